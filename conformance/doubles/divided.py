"""A run on servers and learner ranks that share a machine, by the commands people type, and what it leaves.

Python writes every module that a process imports into its log: code that was never imported ran nowhere.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
import requests

from conformance.doubles.division import SMALL, WEIGHT_FILES, named, typed
from conformance.doubles.instance import free_port
from conformance.doubles.started import finish, in_time, journals_of, started

LEARNING = {"rollmatch.training.trainer", "rollmatch.objectives.rollout_matching.loss", "rollmatch.rollout.fence"}
IMPORTED = re.compile(r"^import time: .*\| +([\w.]+)$", re.MULTILINE)
REPLICA_TOKENS = re.compile(r'^rollmatch_replica_tokens{replica="\d+"} (\S+)$', re.MULTILINE)


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
    server_gpus: frozenset[str]
    """Numbers of the GPUs that hold memory while the server alone is there; empty without GPUs."""

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


def command(name, config, gpus, overrides):
    """The same, with a line for every module that is imported."""
    return ["env", "PYTHONPROFILEIMPORTTIME=1", *typed(name, config, gpus, overrides)]


def run_division(
    folder: Path,
    config: Path,
    *,
    replicas: str,
    learners: str,
    steps: int,
    lists_server: bool = True,
    settings: tuple[str, ...] = (),
) -> Division:
    """Servers and learner, started together. Without ``lists_server``, its modules are not known: it is forked."""
    serve = command if lists_server else typed
    http, out = free_port(), folder / "run"
    overrides = (
        *(*named(config, http, free_port()), *SMALL, *settings),
        *(f"training.output_dir={out}", f"training.max_steps={steps}"),
        f"custom.extra.rollout_server.vllm_data_parallel_size={len(replicas.split(','))}",
    )
    url, logs = f"http://127.0.0.1:{http}", (folder / "server.txt", folder / "learner.txt")
    with started(serve("serve", config, replicas, overrides), logs[0]) as server:
        code, output = finish(command("train", config, learners, overrides), logs[1])
        assert code == 0, output[-3000:] + server.output()[-3000:]
        health = requests.get(f"{url}/health/", timeout=10).json()
        metrics = requests.get(f"{url}/metrics/", timeout=10).text
        family = psutil.Process(server.process.pid).children(recursive=True)
        served, server_gpus = server.output(), gpus_in_use()
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
        server_gpus=server_gpus,
    )


def gpus_in_use() -> frozenset[str]:
    """Numbers of this machine's GPUs on which a gigabyte or more is taken."""
    asked = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except FileNotFoundError:
        return frozenset()
    return frozenset(index for index, used in (row.split(", ") for row in rows) if int(used) >= 1024)


def first_step(events):
    """What happened up to the end of the first optimizer step."""
    return events[: [event["event"] for event in events].index("step") + 1]


def kinds_of(events, kind):
    return [event for event in events if event["event"] == kind]


def check_who_did_what(division, *, num_replicas, num_ranks):
    """Every replica generates; every rank learns and none generates."""
    assert (division.health["replicas"], division.health["world_size"]) == (num_replicas, num_replicas)
    tokens = division.replica_tokens()
    assert len(tokens) == num_replicas
    assert min(tokens) > 0
    asked = sum(len(division.events("called", rank=rank)) for rank in range(num_ranks))
    assert division.num_calls("/native/infer/") == asked > 0
    written = [event for rank in range(num_ranks) for event in division.events("generated", rank=rank)]
    num_stops = sum(event["num_rollouts"] for event in written)  # the server counts stop tokens, which are trimmed here
    assert 0 <= sum(tokens) - sum(event["num_tokens"] for event in written) <= num_stops
    for rank in range(num_ranks):
        for step in division.events("step", rank=rank):
            assert step["learn_tokens"] > 0
            assert step["phase_s"]["learn"] > 0
            assert step["grad_norm"] > 0
    assert division.learner_modules >= LEARNING
    engines = {name for name in division.learner_modules if name.split(".")[0] == "vllm"}
    assert not engines | ({"rollmatch.server.replica", "rollmatch.rollout.vllm_colocate"} & division.learner_modules)
    assert not division.orphans, "the server leaves nobody behind"
