"""Tests run in a forked process whose implementation was changed, and what they said."""

import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.harness.faults.fault import Fault
from conformance.harness.faults.importer import Change, install
from conformance.harness.faults.rests import Ran, digests_of

TIMEOUT_S = 400
LEFT_OUT = ("conformance.harness.binding.plugin", "conformance.garbage", "unraisableexception", "cacheprovider")
"""Plugins that a trial does without: one reads the whole specification, two look for garbage in all that is loaded."""
OPTIONS = (
    *("-q", "--tb=no", "--no-header", "--import-mode=importlib", "--disable-plugin-autoload", "--assert=plain"),
    *("-o", "addopts=", *(word for name in LEFT_OUT for word in ("-p", f"no:{name}"))),
)
WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REACH = Path(__file__).with_name("reach")
ASSERTIONS = ("AssertionError", "Failed")
"""What an assertion raises; pytest's ``raises`` fails by the second. Anything else is a crash and shows little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one test (all its parameters together)."""

    test: str
    verdict: str
    """``passed``, ``killed`` by an assertion, ``crashed``, or ``skipped``."""
    said: str
    """The line of the test that failed, or the error it crashed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A fault or a subject, and the tests that are to notice it."""

    name: str
    tests: Sequence[str]
    change_of: Callable[[str], Change | None]
    fault: Fault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of a trial: test -> what it said, and what the verdicts rest on (nothing where there was no answer)."""

    outcomes: dict[str, Outcome]
    rests: list[str]


class Listener:
    """A pytest plugin that keeps the first word of every test, and what tests and their fixtures ran."""

    def __init__(self, tests: Collection[str] = ()) -> None:
        self.tests = set(tests)
        """Those that are to run."""
        self.outcomes: dict[str, Outcome] = {}
        self.ran = Ran()

    def pytest_collection(self) -> None:
        """Properties draw the same examples every time, and nobody reads the smallest one that fails."""
        from hypothesis import HealthCheck, Phase, settings

        settings.register_profile(
            "faults",
            derandomize=True,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        settings.load_profile("faults")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """One file that cannot be imported keeps no test of another from running."""
        if self.tests:
            items[:] = [item for item in items if test_of(item) in self.tests]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Any:
        self.ran.watch()
        try:
            return (yield)
        finally:
            self.ran.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        test = test_of(item)
        known = self.outcomes.get(test)
        if report.failed and (known is None or known.verdict in ("passed", "skipped")):
            self.outcomes[test] = _failed(test, call)
        elif known is None and (report.skipped or report.when == "call"):
            self.outcomes[test] = Outcome(test=test, verdict="skipped" if report.skipped else "passed", said="")
        elif known is not None and known.verdict == "skipped" and report.when == "call" and report.passed:
            self.outcomes[test] = Outcome(test=test, verdict="passed", said="")
        return report


class Enough:
    """A pytest plugin that leaves out the other parameters of a test that has failed with one."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        known = self.listener.outcomes.get(test_of(item))
        if known is None or known.verdict in ("passed", "skipped"):
            return None
        item.session._setupstate.teardown_exact(nextitem)
        return True


def test_of(item: pytest.Item) -> str:
    """Without its parameters."""
    return item.nodeid.partition("[")[0]


def _failed(test: str, call: pytest.CallInfo[None]) -> Outcome:
    assert call.excinfo is not None
    name = call.excinfo.typename
    entries = [each for each in call.excinfo.traceback if "conformance" in Path(str(each.path)).parts]
    line = str(entries[-1].statement).strip().partition("\n")[0] if entries else ""
    in_ours = "impl" in Path(str(call.excinfo.traceback[-1].path)).parts
    if call.when == "call" and name in ASSERTIONS and not in_ours:
        return Outcome(test=test, verdict="killed", said=line)
    return Outcome(test=test, verdict="crashed", said=f"{name}: {str(call.excinfo.value)[:120]}")


def start_trial(trial: Trial, out: Path, run: "Run | None" = None) -> int:
    """Fork; the child runs the tests, writes what they said to ``out`` and ends. Returns the child's id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.default_int_handler)  # so that what a test has started is ended
        signal.alarm(TIMEOUT_S)
        if trial.fault is not None:
            _reach_children(trial.fault.fault_id)
        speak_into(_told(out))
        listener = (run or run_apart)(trial)
        out.write_text(json.dumps(_answer(listener)))
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def run_apart(trial: Trial) -> Listener:
    """The tests in a pytest of their own; what is changed is imported changed."""
    install(trial.change_of)
    listener = Listener(trial.tests)
    files = {test.partition("::")[0] for test in trial.tests}
    pytest.main([*OPTIONS, "--continue-on-collection-errors", *sorted(files)], plugins=[listener, Enough(listener)])
    return listener


Run = Callable[[Trial], Listener | None]
"""Returns None, having done nothing, where it cannot run that trial."""


def _reach_children(fault_id: str) -> None:
    """Let processes that are started from here have the fault, too; engines that they fork have it anyway."""
    os.environ["ROLLMATCH_FAULT"] = fault_id
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REACH), os.environ.get("PYTHONPATH"))))


def speak_into(path: Path) -> None:
    """Whatever this process and those it starts write; and nobody types."""
    for standard, target, how in ((0, os.devnull, os.O_RDONLY), (1, path, WRITE), (2, path, WRITE)):
        opened = os.open(target, how, 0o666)
        os.dup2(opened, standard)
        os.close(opened)


def _told(out: Path) -> Path:
    return out.with_suffix(".told")


def _answer(listener: Listener | None) -> dict[str, Any]:
    if listener is None:
        return {"refused": True, "outcomes": [], "ran": {}}
    outcomes = [asdict(each) for each in listener.outcomes.values()]
    return {"refused": False, "outcomes": outcomes, "ran": listener.ran.lines()}


def read_trial(out: Path, trial: Trial) -> Answer | None:
    """What was said; a test that said nothing crashed with all others (a timeout, an import that failed).

    None where the trial was refused: it has to run apart.
    """
    stored = json.loads(out.read_text()) if out.exists() else {"refused": False, "outcomes": [], "ran": {}}
    if stored["refused"]:
        return None
    said = {each["test"]: Outcome(**each) for each in stored["outcomes"]}
    lines = [line for line in _told(out).read_text(errors="replace").split("\n") if line.strip()]
    silent = f"nothing was said: {lines[-1][:160] if lines else 'no answer in time'}"
    outcomes = {test: said.get(test, Outcome(test=test, verdict="crashed", said=silent)) for test in trial.tests}
    rests = digests_of(stored["ran"], changed=trial.fault.path) if stored["ran"] and trial.fault else []
    return Answer(outcomes=outcomes, rests=rests)
