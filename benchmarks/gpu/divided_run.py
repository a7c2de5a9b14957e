"""A run on rollout servers and learner ranks by the commands people type, and the figures it left behind."""

import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conformance.doubles.division import GRPO, typed
from conformance.doubles.instance import free_port
from conformance.doubles.started import finish, in_time, journals_of, keep, started
from conformance.gpu.memory_watch import MemoryWatch
from conformance.tools.judge import judge

SERVER = "custom.extra.rollout_server"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDivision:
    """Which GPUs generate and which learn, such as ``0,1,2`` and ``3``."""

    replicas: str
    learners: str

    @property
    def num_replicas(self):
        return len(self.replicas.split(","))

    @property
    def num_learners(self):
        return len(self.learners.split(","))

    def __str__(self):
        return f"{self.num_replicas}+{self.num_learners}"


class DividedRun:
    """GRPO in server mode by ``fixtures/digits/grpo-6v2.yaml``, with settings laid over it."""

    def __init__(self, folder: Path, division: GpuDivision, *, steps: int, overrides: tuple[str, ...]):
        folder.mkdir(parents=True)
        self.folder, self.division, self.steps = folder, division, steps
        self.out, self.port = folder / "run", free_port()
        self.overrides = (
            f"rlhf.vllm_server_port=[{self.port}]",
            f"rlhf.vllm_server_group_port={free_port()}",
            f"{SERVER}.vllm_data_parallel_size={division.num_replicas}",
            f"training.output_dir={self.out}",
            f"training.max_steps={steps}",
            "training.save_steps=1000",
            "training.report_to=none",
            *overrides,
        )

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def serve_command(self, *flags):
        return typed("serve", GRPO, self.division.replicas, self.overrides, *flags)

    @contextmanager
    def server(self):
        """Ready, after that many seconds."""
        began = time.monotonic()
        with started(self.serve_command(), self.folder / "server.txt") as server:
            server.wait_healthy(self.url)
            yield time.monotonic() - began

    def learn(self):
        """Run the learner to its end; its figures."""
        command = typed("train", GRPO, self.division.learners, self.overrides)
        with MemoryWatch() as watch:
            code, log = finish(command, self.folder / "learner.txt")
        assert code == 0, log[-3000:]
        return self.figures() | {"most_memory_mib": watch.most_mib}

    def figures(self):
        """From the journals of all ranks."""
        journals = journals_of(self.out, num_ranks=self.division.num_learners)
        first, trace = journals[0], in_time(journals)
        keep(trace, self.folder / "trace.jsonl")
        kinds = {name: [event for event in first if event["event"] == name] for name in ("step", "synced", "evaluated")}
        later = kinds["step"][1:] or kinds["step"]
        response_len = statistics.mean(event["response_len"] for event in later)
        segment_len = statistics.mean(event["learn_tokens"] / event["segments"] for event in later)
        return {
            "division": str(self.division),
            "steps": len(kinds["step"]),
            "rewards": [event["metrics"]["reward"] for event in kinds["evaluated"]],
            "versions": [event["version"] for event in kinds["synced"]],
            "sync_bytes": kinds["synced"][-1]["num_bytes"],
            "sync_s": [event["seconds"] for event in kinds["synced"]],
            "broken_rules": list(map(str, judge(trace))),
            "step_s": statistics.median(event["step_s"] for event in later),
            "phase_s": {
                name: statistics.median(event["phase_s"][name] for event in later) for name in later[0]["phase_s"]
            },
            "response_len": response_len,
            "prompt_len": segment_len - response_len,
            "rollout_tok_s": statistics.median(event["rollout_tok_s"] for event in later),
        }
