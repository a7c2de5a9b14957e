"""Tests run in a forked process whose implementation was changed, and what they said."""

import gc
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.harness.faults.fault import Fault
from conformance.harness.faults.importer import Change, install
from conformance.harness.faults.rests import Ran

TIMEOUT_S = 400
PRELOADED = ("numpy", "scipy.optimize", "scipy.special", "pydantic", "hypothesis", "PIL.Image", "pycocotools.mask")
HEAVY = (
    *("torch", "torch.distributed", "torch.utils.checkpoint", "peft", "accelerate", "rich.console", "jinja2", "yaml"),
    *("transformers.trainer", "transformers.trainer_callback", "transformers.integrations.sdpa_attention"),
    *("transformers.models.auto.processing_auto", "transformers.models.qwen3_vl.modeling_qwen3_vl"),
    *("transformers.models.qwen3_vl.processing_qwen3_vl", "transformers.models.qwen3.modeling_qwen3"),
    *("transformers.generation.utils", "transformers.models.qwen2.tokenization_qwen2"),
    *("requests", "fastapi", "fastapi.testclient", "uvicorn", "prometheus_client", "msgspec", "xxhash", "anyio"),
    *("_pytest.helpconfig", "_pytest.junitxml", "_pytest.skipping", "_pytest.faulthandler", "_pytest.pastebin"),
    *("_pytest.unittest", "_pytest.warnings", "_pytest.setupplan", "_pytest.threadexception", "tomllib._parser"),
    *("PIL.PngImagePlugin", "torch.utils.serialization.config", "transformers.tokenization_mistral_common"),
)
PROCESSOR = Path(__file__).parents[3] / "fixtures/models/digits"
"""Loading one makes transformers look through all its models."""
LEFT_OUT = ("conformance.harness.binding.plugin", "conformance.garbage", "unraisableexception", "cacheprovider")
"""Plugins that a trial does without: one reads the whole specification, two look for garbage in all that is loaded."""
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


class Listener:
    """A pytest plugin that keeps the first word of every test, and what tests and their fixtures ran."""

    def __init__(self) -> None:
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

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Any:
        self.ran.watch()
        try:
            return (yield)
        finally:
            self.ran.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        test = item.nodeid.partition("[")[0]
        known = self.outcomes.get(test)
        if report.failed and (known is None or known.verdict in ("passed", "skipped")):
            self.outcomes[test] = _failed(test, call)
        elif known is None and (report.skipped or report.when == "call"):
            self.outcomes[test] = Outcome(test=test, verdict="skipped" if report.skipped else "passed", said="")
        elif known is not None and known.verdict == "skipped" and report.when == "call" and report.passed:
            self.outcomes[test] = Outcome(test=test, verdict="passed", said="")
        return report


def _failed(test: str, call: pytest.CallInfo[None]) -> Outcome:
    assert call.excinfo is not None
    name = call.excinfo.typename
    entries = [each for each in call.excinfo.traceback if "conformance" in Path(str(each.path)).parts]
    line = str(entries[-1].statement).strip().partition("\n")[0] if entries else ""
    in_ours = "impl" in Path(str(call.excinfo.traceback[-1].path)).parts
    if call.when == "call" and name in ASSERTIONS and not in_ours:
        return Outcome(test=test, verdict="killed", said=line)
    return Outcome(test=test, verdict="crashed", said=f"{name}: {str(call.excinfo.value)[:120]}")


def preload() -> None:
    """Import what every trial would import anyway, once; nothing of the implementation."""
    for name in (*PRELOADED, *HEAVY):
        __import__(name)
    sys.modules["transformers.models.auto.processing_auto"].AutoProcessor.from_pretrained(PROCESSOR)
    gc.freeze()


def reach_children(fault_id: str) -> None:
    """Let processes that are started from here have the fault, too; engines that they fork have it anyway."""
    os.environ["ROLLMATCH_FAULT"] = fault_id
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REACH), os.environ.get("PYTHONPATH"))))


def start_trial(
    tests: Sequence[str], change_of: Callable[[str], Change | None], out: Path, *, fault: Fault | None = None
) -> int:
    """Fork; the child runs the tests, writes what they said to ``out`` and ends. Returns the child's id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.default_int_handler)  # so that what a test has started is ended
        signal.alarm(TIMEOUT_S)
        if fault is not None:
            reach_children(fault.fault_id)
        told = io.StringIO()
        with redirect_stdout(told), redirect_stderr(told):
            listener = _run(tests, change_of)
        out.write_text(json.dumps(_answer(listener, fault) | {"told": told.getvalue()[-4000:]}))
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def _answer(listener: Listener, fault: Fault | None) -> dict[str, Any]:
    outcomes = [asdict(each) for each in listener.outcomes.values()]
    return {"outcomes": outcomes, "rests": listener.ran.digests(changed=fault.path) if fault is not None else []}


def read_trial(out: Path, tests: Sequence[str]) -> dict[str, Outcome]:
    """Test -> what it said; a test that said nothing crashed with all others (a timeout, an import that failed)."""
    stored = _stored(out)
    said = {each["test"]: Outcome(**each) for each in stored["outcomes"]}
    lines = [line for line in stored["told"].split("\n") if line.strip()]
    silent = f"nothing was said: {lines[-1][:160] if lines else ''}"
    return {test: said.get(test, Outcome(test=test, verdict="crashed", said=silent)) for test in tests}


def read_ran(out: Path) -> list[str]:
    """What the verdicts rest on; nothing where there was no answer."""
    return list(_stored(out)["rests"])


def _stored(out: Path) -> dict[str, Any]:
    nothing = {"outcomes": [], "rests": [], "told": "no answer in time"}
    return dict(json.loads(out.read_text())) if out.exists() else nothing


def _run(tests: Sequence[str], change_of: Callable[[str], Change | None]) -> Listener:
    install(change_of)
    listener = Listener()
    options = ("-q", "--tb=no", "--no-header", "--import-mode=importlib", "--disable-plugin-autoload", "--assert=plain")
    without = [word for name in LEFT_OUT for word in ("-p", f"no:{name}")]
    pytest.main([*options, "-o", "addopts=", *without, *tests], plugins=[listener])
    return listener
