"""Known gaps of other people's servers: which check they miss, why, and where that is told."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from conformance.servers.check import MISSED, MUST, PASSED, UNTESTABLE, Check, CheckVerdict
from conformance.servers.checks import BY_ID

FOLDER = Path(__file__).parent / "gaps"
KNOWN, STALE, ADVICE = "known-gap", "stale-gap", "advice"


class GapMalformed(ValueError):
    """A gap names a check that there is, a reason and a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Why a server misses a check."""

    check_id: str
    reason: str
    link: str


def load_gaps(path: Path) -> Mapping[str, Gap]:
    """By check; none where there is no file. Errors: ``GapMalformed``."""
    if not path.exists():
        return {}
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    for entry in entries:
        if set(entry) != {"check", "reason", "link"} or entry["check"] not in BY_ID:
            raise GapMalformed(f"{path.name}: {entry}")
    return {e["check"]: Gap(check_id=e["check"], reason=e["reason"], link=e["link"]) for e in entries}


def gaps_of(server: str) -> Path:
    """``server``: name and version, joined by a hyphen."""
    return FOLDER / f"{server}.yaml"


def settle(check: Check, verdict: CheckVerdict, gaps: Mapping[str, Gap]) -> tuple[str, str]:
    """State and reason once the known gaps are taken into account: passed, missed, known-gap, stale-gap, advice,
    not-testable.

    A gap that passes is stale. A SHOULD that nobody excuses is advice, a MUST is missed.
    """
    gap = gaps.get(check.check_id)
    if verdict.state == UNTESTABLE:
        return UNTESTABLE, verdict.reason
    if verdict.state == PASSED:
        return (STALE, f"passes, but is listed as a gap: {gap.reason}") if gap else (PASSED, "")
    if gap:
        return KNOWN, f"{gap.reason} ({verdict.reason})"
    return (MISSED if check.grade == MUST else ADVICE), verdict.reason


FAILING = (MISSED, STALE)
