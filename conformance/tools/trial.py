"""Tests against a changed module: each trial is a fork of a process that has loaded torch and pytest, but none of ours.

The fork sees a copy of ``impl/`` made of links, in which one file is another one; processes that a test starts see the
same copy, by ``PYTHONPATH``.
"""

import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
IMPL = ROOT / "impl"
PRELOADED = (
    "scipy.optimize",
    "hypothesis",
    "pycocotools.mask",
    "rich",
    "peft",
    "requests",
    "fastapi.testclient",
    "uvicorn",
    "msgspec",
    "transformers.trainer",
    "transformers.models.auto.processing_auto",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl.processing_qwen3_vl",
)
"""With what these import: torch, accelerate, pydantic, ..."""
OPTIONS = ("-q", "--tb=short", "--import-mode=importlib", "-o", "addopts=", "-p", "no:cacheprovider")
NAMED = ("-m", "not gpu or wide")
"""A test that is named runs, also a wide one."""
COSTLY = ("engine", "slow", "wide")
"""Markers of tests that take many seconds: they judge last, and before them those that type whole commands."""
VERDICTS = {0: "passed", 1: "failed", 2: "broken", 4: "set-up failed"}
"""Exit status of a fork: a test failed; none could run; only what prepares tests failed. Any other is ``timeout``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    name: str
    path: Path
    """The changed file, below ``impl/``."""
    source: str
    tests: tuple[str, ...]
    timeout_s: int = 240
    budget_s: float = math.inf
    """Processor time after which no further test begins."""
    with_doctests: bool = False
    """Whether the examples in the changed file are run, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    trial: Trial
    outcome: str
    log: str


def run_trials(trials: Iterable[Trial], *, num_workers: int) -> Iterator[TrialResult]:
    """Run trials in forks, as many at a time as workers; yield results as they end."""
    for name in PRELOADED:
        import_module(name)
    loaded = [name for name in sys.modules if name.partition(".")[0] == "rollmatch"]
    assert not loaded, f"a fork would keep {loaded[0]} as it is: import rollmatch only in trials"
    running: dict[int, tuple[Trial, Path]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for trial in trials:
            if not trial.tests and not trial.with_doctests:
                yield TrialResult(trial=trial, outcome="not reached", log="no test reaches it\n")
                continue
            folder = Path(tempfile.mkdtemp(dir=scratch))
            running[_start(trial, folder)] = trial, folder
            if len(running) == num_workers:
                yield _end(running)
        while running:
            yield _end(running)


def _end(running: dict[int, tuple[Trial, Path]]) -> TrialResult:
    child, status = os.wait()
    while child not in running:  # somebody else's, inherited
        child, status = os.wait()
    trial, folder = running.pop(child)
    outcome = VERDICTS.get(os.waitstatus_to_exitcode(status), "timeout")
    log = (folder / "log").read_text(encoding="utf-8", errors="replace")
    shutil.rmtree(folder, ignore_errors=True)
    return TrialResult(trial=trial, outcome=outcome, log=log)


def _start(trial: Trial, folder: Path) -> int:
    """The child's process id; the child leads a process group of its own, and leaves no process behind."""
    child = os.fork()
    if child:
        return child
    status = 3
    sys.modules["__main__"] = ModuleType("__main__")  # or processes that tests start would load the caller's
    try:
        os.setsid()
        tests = os.fork()
        status = _wait_alone(tests, trial.timeout_s) if tests else _run(trial, folder)
    finally:
        sys.stdout.flush()
        os._exit(status)


def _wait_alone(tests: int, timeout_s: int) -> int:
    """Status of a fork, which has so many seconds; then end all that it has started, in whatever session.

    The alarm rings here, because pytest-timeout sets the fork's own.
    """
    from rollmatch.launch.processes import adopt_orphans, kill_orphans  # not before the fork, which loads a copy

    adopt_orphans()
    signal.signal(signal.SIGALRM, lambda *_: os.kill(tests, signal.SIGKILL))
    signal.alarm(timeout_s)
    child, ended = os.wait()
    while child != tests:  # an orphan that was adopted, which a test may wait for to be gone
        child, ended = os.wait()
    status = os.waitstatus_to_exitcode(ended)
    kill_orphans()
    return status if status in VERDICTS else 3


def _run(trial: Trial, folder: Path) -> int:
    """Run the tests, with their output in a file."""
    log, impl = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), folder / "impl"
    os.dup2(log, 1)
    os.dup2(log, 2)
    link_tree(impl, trial.path, trial.source)
    os.environ["PYTHONPATH"] = f"{impl}{os.pathsep}{ROOT}"
    sys.path[:0] = [str(impl), str(ROOT)]
    os.chdir(ROOT)
    listener = Listener(trial.budget_s)
    paths = ["-o", f"pythonpath={impl} {ROOT}", "--basetemp", str(folder / "tmp")]
    doctests = ("--doctest-modules", str(impl / trial.path)) if trial.with_doctests else ()
    status = pytest.main([*OPTIONS, *NAMED, *paths, *doctests, *trial.tests], plugins=[listener])
    if listener.failed or listener.unprepared:
        return 1 if listener.failed else 4
    return 0 if listener.num_passed or status == pytest.ExitCode.OK else 2


class Listener:
    """A pytest plugin: the first test that fails in its own code ends the run, and so does a spent budget.

    A test that fails in its collection or set-up does not end it: it may need what a fork does not have.
    """

    def __init__(self, budget_s: float) -> None:
        self.failed: list[str] = []
        self.unprepared: list[str] = []
        self.num_passed = 0
        self.budget_s = budget_s

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self.num_passed += report.passed
            self.failed += [report.nodeid] * report.failed
        elif report.when == "setup":
            self.unprepared += [report.nodeid] * report.failed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=_cost)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """After each test: set before one, it would end the run after that one only."""
        done = yield
        if self.failed or time.process_time() > self.budget_s:
            item.session.shouldstop = "a test failed, or the budget is spent"
        return done


def _cost(item: pytest.Item) -> tuple[bool, bool]:
    return any(item.get_closest_marker(name) for name in COSTLY), item.path.parent.name in ("run", "launch", "interop")


def link_tree(target: Path, path: Path, source: str) -> None:
    """``impl/`` as links, but ``path`` (below it) with another source."""
    folder, original = target, IMPL
    for name in path.parts:
        folder.mkdir()
        for each in original.iterdir():
            if each.name not in (name, "__pycache__"):
                (folder / each.name).symlink_to(each)
        folder, original = folder / name, original / name
    folder.write_text(source, encoding="utf-8")
