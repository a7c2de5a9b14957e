"""``python -m conformance.trainers.known NAME...``: install, judge and record the trainers that people run."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from conformance.rollout.digits import ROOT
from conformance.servers.broken.engine import TinyEngine
from conformance.servers.broken.switches import Switches
from conformance.servers.install import interpreter_of
from conformance.servers.known import PLUGGED
from conformance.servers.recording import facts_of_today
from conformance.servers.verdicts import summary
from conformance.trainers.recording import TrainerRecording, write_trainer
from conformance.trainers.runs import RUNS, TrainerRuns, TrainerSubject, command_launch, spoken

ARITHMETIC = ROOT / "fixtures/models/arithmetic"
VLLM = "custom.extra.rollout_matching.vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTrainer:
    """A trainer of a version, as it is judged."""

    name: str
    version: str
    dialect: str
    title: str
    command: Callable[[str], Sequence[str]]
    """(its interpreter) -> command with placeholders."""
    packages: tuple[str, ...] = ()
    """Pinned; none for what stands in this environment."""
    paths: tuple[str, ...] = field(default=())
    """Put on ``PYTHONPATH``."""

    @property
    def trainer(self) -> str:
        return f"{self.name}-{self.version}"


def _own(_: str) -> list[str]:
    sets = {
        f"{VLLM}.mode": "server",
        f"{VLLM}.server.base_url": "{url}",
        f"{VLLM}.server.group_port": "{group_port}",
        "training.output_dir": "{out}/run",
        "training.max_steps": "{steps}",
        "training.warmup_steps": "0",
        "training.per_device_train_batch_size": "4",
        "training.eval_scenes": "4",
        "training.report_to": "none",
    }
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "rollmatch", "train", str(ROOT / "fixtures/arithmetic/grpo.yaml"), *words]


def _trl(python: str) -> list[str]:
    script = str(PLUGGED / "trl_on_a_cpu.py")
    return [python, script, "{url}", "{group_port}", "{model}", "{steps}", "{out}/run"]


KNOWN = (
    *(
        KnownTrainer(
            name=f"rollmatch-{dialect}",
            version="0.1.0",
            dialect=dialect,
            title=f"rollmatch train, {dialect} dialect",
            command=_own,
        )
        for dialect in ("swift", "trl", "vllm")
    ),
    KnownTrainer(
        name="trl",
        version="1.10.0",
        dialect="trl",
        title="GRPOTrainer of TRL",
        command=_trl,
        packages=("trl==1.10.0",),
        paths=(str(PLUGGED),),
    ),
)
BY_NAME = {known.name: known for known in KNOWN}


def record(known: KnownTrainer) -> int:
    """Judge and record one. Returns the number of failing checks."""
    python = str(interpreter_of(known.name, known.version, known.packages))
    paths = [*known.paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    words = known.command(python)
    subject = TrainerSubject(
        launch=command_launch(words),
        engine=TinyEngine(str(ARITHMETIC), Switches()),
        dialect=known.dialect,
        dtype="float32",
        steps=3,
    )
    runs = TrainerRuns(subject)
    for name in RUNS:
        exchange = runs.run(name)
        _say(f"{known.name:16} {name:8} ended with {exchange.notes['code']}")
    facts = facts_of_today(model="fixtures/models/arithmetic", packages=list(known.packages), steps=subject.steps)
    facts |= {"title": known.title, "command": spoken(["python", *words[1:]])}
    recording = TrainerRecording(trainer=known.trainer, dialect=known.dialect, facts=facts, runs=runs.made)
    rows = recording.rows()
    for row in rows:
        _say(f"{known.name:16} {row}")
    _say(f"{write_trainer(recording).name}: {summary(rows)}")
    return sum(row.fails for row in rows)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(names: Sequence[str]) -> int:
    """1 where a check fails, and 2 for a name that nobody knows."""
    if unknown := set(names) - BY_NAME.keys():
        _say(f"no trainer {', '.join(sorted(unknown))}; there are {', '.join(BY_NAME)}")
        return 2
    num_failing = sum(record(known) for known in KNOWN if not names or known.name in names)
    from conformance.servers.page import write_page

    write_page()
    return int(num_failing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
