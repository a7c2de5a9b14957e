"""A division of a machine, run by the commands people type, and what is left of it to look at.

Python writes every module that a process imports into its log: code that was never imported ran nowhere.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import psutil
import requests

from conformance.cli.started import cli_command, finish, in_time, journals_of, started
from conformance.rollout.digits import ROOT
from conformance.server.instance import free_port

VLLM = "custom.extra.rollout_matching.vllm"
MATCHING = ROOT / "fixtures/digits/3v1.yaml"
GRPO = ROOT / "fixtures/digits/grpo-6v2.yaml"
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
IMPORTED = re.compile(r"^import time: .*\| +([\w.]+)$", re.MULTILINE)
REPLICA_TOKENS = re.compile(r'^rollmatch_replica_tokens{replica="\d+"} (\S+)$', re.MULTILINE)
SMALL = (
    f"{VLLM}.kv_cache_memory_mib=64",
    "training.save_steps=1000",
    "training.eval_scenes=6",
    "training.report_to=none",
    "training.learner_threads=1",
)
BESIDE_DOUBLES = (
    f"{VLLM}.mode=server",
    f"{VLLM}.max_model_len=512",
    "custom.extra.rollout_matching.max_new_tokens=4",
    "training.per_device_train_batch_size=2",
    "training.eval_scenes=2",
    "training.save_steps=1000",
    "training.optim=sgd",
    "training.learner_threads=1",
    "training.report_to=none",
)
"""Of a learner whose servers answer by transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What a run on servers and learner ranks has left."""

    out: Path
    code: int
    output: str
    health: dict
    """The server's, after the run."""
    metrics: str
    """The server's, after the run."""
    server_modules: frozenset[str]
    """Empty where they were not listed."""
    learner_modules: frozenset[str]
    weight_files: frozenset[Path]
    """Written by either, relative to ``out``."""
    orphans: list[psutil.Process]

    def events(self, kind: str, *, rank: int = 0) -> list[dict]:
        return journals_of(self.out, kind, num_ranks=rank + 1)[rank]

    def journal(self, *, num_ranks: int) -> list[dict]:
        """Of all ranks, in the order of time."""
        assert len(list(self.out.glob("journal*.jsonl"))) == num_ranks
        return in_time(journals_of(self.out, num_ranks=num_ranks))

    def replica_tokens(self) -> list[float]:
        """Response tokens that each replica has written."""
        return [float(count) for count in REPLICA_TOKENS.findall(self.metrics)]

    def num_calls(self, *routes: str) -> int:
        """Calls of all these routes together that were answered with 200."""
        named = "|".join(map(re.escape, routes))
        answered = rf'^rollmatch_requests_total{{route="(?:{named})",status="200"}} (\S+)$'
        return sum(int(float(count)) for count in re.findall(answered, self.metrics, re.MULTILINE))


def named(config, http, group):
    """The server, as each YAML names it."""
    if config == GRPO:
        return (
            f"model.model={ROOT}/fixtures/models/digits-summary",
            f"rlhf.vllm_server_port=[{http}]",
            f"rlhf.vllm_server_group_port={group}",
            "training.per_device_train_batch_size=2",
        )
    return (
        f"{VLLM}.mode=server",
        f"{VLLM}.server.base_url=http://127.0.0.1:{http}",
        f"{VLLM}.server.group_port={group}",
        "training.per_device_train_batch_size=3",
        "custom.extra.rollout_matching.max_new_tokens=24",
    )


def typed(name, config, gpus, overrides, *flags):
    """A command line as one would type it."""
    return [*cli_command(name, config, *overrides), "--gpus", gpus, *flags]


def command(name, config, gpus, overrides):
    """The same, with a line for every module that is imported."""
    return ["env", "PYTHONPROFILEIMPORTTIME=1", *typed(name, config, gpus, overrides)]


def run_division(
    folder: Path, config: Path, *, replicas: str, learners: str, steps: int, lists_server: bool = True
) -> Division:
    """Servers and learner, started together. Without ``lists_server``, its modules are not known: it is forked."""
    serve = command if lists_server else typed
    http, out = free_port(), folder / "run"
    overrides = (
        *(*named(config, http, free_port()), *SMALL, f"training.output_dir={out}", f"training.max_steps={steps}"),
        f"custom.extra.rollout_server.vllm_data_parallel_size={len(replicas.split(','))}",
    )
    url, logs = f"http://127.0.0.1:{http}", (folder / "server.txt", folder / "learner.txt")
    with started(serve("serve", config, replicas, overrides), logs[0]) as server:
        code, output = finish(command("train", config, learners, overrides), logs[1])
        assert code == 0, output[-3000:] + server.output()[-3000:]
        health = requests.get(f"{url}/health/", timeout=10).json()
        metrics = requests.get(f"{url}/metrics/", timeout=10).text
        family = psutil.Process(server.process.pid).children(recursive=True)
        served = server.output()
    _, orphans = psutil.wait_procs(family, timeout=20)
    return Division(
        out=out,
        code=code,
        output=IMPORTED.sub("", output),
        health=health,
        metrics=metrics,
        server_modules=frozenset(IMPORTED.findall(served)),
        learner_modules=frozenset(IMPORTED.findall(output)),
        weight_files=frozenset(path.relative_to(out) for kind in WEIGHT_FILES for path in folder.rglob(kind)),
        orphans=orphans,
    )
