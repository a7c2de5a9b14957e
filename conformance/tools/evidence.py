"""What a run showed of the scenarios that its tests are bound to."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Evidence:
    """Filled from reports of this process or of xdist's workers."""

    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)
    """Scenario -> test -> passed, failed or skipped."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Test -> duration."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A hook of pytest's. A skip, expected failures among them, shows nothing."""
        scenarios = [value for name, value in report.user_properties if name == "scenario"]
        outcome = "failed" if report.failed else "skipped" if report.skipped else "passed"
        if not scenarios or (outcome == "passed" and report.when != "call"):
            return
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        for each in scenarios:
            tests = self.outcomes.setdefault(each, {})
            if tests.get(report.nodeid) != "failed":
                tests[report.nodeid] = outcome

    def verdicts(self) -> dict[str, str]:
        """Scenario -> passed, failed or not-shown."""
        return {each: verdict_of(tests.values()) for each, tests in self.outcomes.items()}

    def not_shown(self) -> list[str]:
        """Scenarios whose tests were all skipped, with the tests."""
        verdicts = self.verdicts()
        return [
            f"{each}: not shown, its tests were skipped: {', '.join(tests)}"
            for each, tests in self.outcomes.items()
            if verdicts[each] == "not-shown"
        ]


def verdict_of(outcomes: Iterable[str]) -> str:
    """One failure fails; otherwise one pass passes.

    >>> verdict_of(["passed", "skipped"]), verdict_of(["passed", "failed"]), verdict_of(["skipped"])
    ('passed', 'failed', 'not-shown')
    """
    found = set(outcomes)
    return "failed" if "failed" in found else "passed" if "passed" in found else "not-shown"
