"""Runs of a trainer, each against a fresh recording server; checks share them."""

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from conformance.judge.ports import free_port
from conformance.judge.servers.broken.engine import TinyEngine
from conformance.judge.servers.exchange import Exchange
from conformance.judge.trainers.server import BUSY, LATE, RESTART, SHORT, UNAVAILABLE, RecordingServer, recording

PLAIN, AGAIN = "plain", "again"
RUNS = (PLAIN, AGAIN, LATE, SHORT, BUSY, UNAVAILABLE, RESTART)
VARIABLE = "ROLLMATCH_JUDGE_"
TAIL = 2000
Values = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerEnding:
    """``code``: None where the trainer was ended because its time was over."""

    code: int | None
    output: str = ""


Launch = Callable[[Values, float], TrainerEnding]
"""Starts a trainer and waits for it, so many seconds at most."""


@dataclass(slots=True, kw_only=True)
class TrainerSubject:
    """A trainer under judgement."""

    launch: Launch
    engine: TinyEngine
    dialect: str
    dtype: str
    steps: int
    ranks: int = 1
    limit_s: float = 300.0
    late_s: float = 8.0
    down_s: float = 1.0


@dataclass(slots=True)
class TrainerRuns:
    """Each run is made once, when a check asks for it."""

    subject: TrainerSubject | None
    """None: there are recorded ones only."""
    made: dict[str, Exchange] = field(default_factory=dict)
    server: RecordingServer | None = None
    """Of the run that was made last."""

    def run(self, name: str) -> Exchange:
        """What arrived; ``notes`` has events, code and output."""
        if name not in self.made:
            self.made[name] = self._run(name)
        return self.made[name]

    def _run(self, name: str) -> Exchange:
        subject, fault = self.subject, "" if name in (PLAIN, AGAIN) else name
        if subject is None:
            return Exchange(notes={"events": []}, untestable=f"the run {name} was not recorded")
        server = self.server = RecordingServer(
            subject.engine, subject.dialect, dtype=subject.dtype, fault=fault, late_s=subject.late_s
        )
        with tempfile.TemporaryDirectory(prefix="judged-") as folder, recording(server, down_s=subject.down_s):
            ending = subject.launch(_values(subject, server.url, folder), subject.limit_s)
        notes = {
            "run": name,
            "steps": subject.steps,
            "code": ending.code,
            "output": ending.output,
            "events": server.arrivals.events,
        }
        exchange = Exchange(calls=server.arrivals.calls, notes=notes)
        if fault and not server.is_disturbed:
            exchange.untestable = "the run ended before its second rollouts, which would have been disturbed"
        return exchange


def _values(subject: TrainerSubject, url: str, folder: str) -> dict[str, str]:
    """Of each placeholder."""
    place = urlsplit(url)
    return {
        "url": url,
        "host": str(place.hostname),
        "port": str(place.port),
        "group_port": str(free_port()),
        "model": subject.engine.directory,
        "steps": str(subject.steps),
        "ranks": str(subject.ranks),
        "out": folder,
    }


def filled(words: Sequence[str], values: Values) -> list[str]:
    """The words with their placeholders replaced; other braces stay.

    >>> filled(["--url={url}", '{"a": 1}'], {"url": "http://h"})
    ['--url=http://h', '{"a": 1}']
    """
    made = []
    for word in words:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", value)
        made.append(word)
    return made


def command_launch(words: Sequence[str]) -> Launch:
    """A command of this machine; its output goes to a file, and its whole session ends with it."""

    def launch(values: Values, limit_s: float) -> TrainerEnding:
        environment = os.environ | {VARIABLE + name.upper(): value for name, value in values.items()}
        log = Path(values["out"]) / "output.txt"
        with log.open("w") as output:
            process = subprocess.Popen(
                filled(words, values), env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        return TrainerEnding(code=code, output=log.read_text(errors="replace")[-TAIL:])

    return launch


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The session of the command, which may have left processes behind."""
    for number, wait_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 0.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + wait_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    process.wait()


def spoken(words: Sequence[str]) -> str:
    """As one types it."""
    return shlex.join(words)


def ending_of(exchange: Exchange) -> Any:
    """Exit code; None where its time was over."""
    return exchange.notes["code"]
