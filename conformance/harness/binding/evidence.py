"""What a run has shown: outcomes of tests by the scenario they are bound to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.harness.spec_error import Finding


@dataclass(slots=True)
class Evidence:
    """Filled from reports, whichever worker made them."""

    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)
    """Scenario -> test -> passed, failed or skipped."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Test -> how long it took."""

    def take(self, report: Any) -> None:
        """One report of pytest's: of a phase of a test. A skip, expected failures among them, shows nothing."""
        ids = [value for name, value in report.user_properties if name == "scenario"]
        if not ids:
            return
        outcome = "failed" if report.failed else "skipped" if report.skipped else "passed"
        if outcome == "passed" and report.when != "call":
            return
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        for each in ids:
            told = self.outcomes.setdefault(each, {})
            if told.get(report.nodeid) != "failed":
                told[report.nodeid] = outcome

    def verdicts(self) -> dict[str, str]:
        """Scenario -> passed, failed or not-shown."""
        return {each: verdict_of(told.values()) for each, told in self.outcomes.items()}

    def findings(self) -> list[Finding]:
        """Scenarios whose tests were all skipped: nobody has seen them hold."""
        return [
            Finding(
                code="scenario-not-shown",
                key=each,
                problem="its tests were skipped, which shows nothing.",
                remedy=f"Run what they need, or leave them out: {', '.join(self.outcomes[each])}",
            )
            for each, verdict in self.verdicts().items()
            if verdict == "not-shown"
        ]


def verdict_of(outcomes: Iterable[str]) -> str:
    """One failure fails; otherwise one pass passes.

    >>> verdict_of(["passed", "skipped"]), verdict_of(["passed", "failed"]), verdict_of(["skipped"])
    ('passed', 'failed', 'not-shown')
    """
    told = set(outcomes)
    return "failed" if "failed" in told else "passed" if "passed" in told else "not-shown"


def count_verdicts(verdicts: Mapping[str, str]) -> dict[str, int]:
    """How often each verdict was given."""
    counts = dict.fromkeys(("passed", "failed", "not-shown"), 0)
    for verdict in verdicts.values():
        counts[verdict] += 1
    return counts
