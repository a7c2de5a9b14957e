"""Known gaps of servers: the check that is missed, the reason, a link."""

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from conformance.servers.check import FAULTY, MUST, PASSED, UNTESTABLE, Check, CheckVerdict
from conformance.servers.checks import BY_ID

FOLDER = Path(__file__).parent / "gaps"
PASS, MISSES_MUST, MISSES_SHOULD, BLOCKED = "pass", "must", "should", "blocked-by"
KNOWN, STALE = "known-gap", "stale-gap"
"""Verdicts, beside ``not-testable`` and ``harness-error``."""


class GapMalformed(ValueError):
    """A gap does not name an existing check, a reason and a link."""


class Gap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a server misses a check."""

    check: str
    reason: str
    link: str


def load_gaps(path: Path, known: Collection[str] = BY_ID) -> Mapping[str, Gap]:
    """By check, of the ``known`` ones; none where there is no file. Errors: ``GapMalformed``."""
    if not path.exists():
        return {}
    try:
        gaps = msgspec.yaml.decode(path.read_bytes(), type=list[Gap])
    except msgspec.ValidationError as error:
        raise GapMalformed(f"{path.name}: {error}") from None
    if unknown := {gap.check for gap in gaps} - {*known}:
        raise GapMalformed(f"{path.name}: there is no check {sorted(unknown)}")
    return {gap.check: gap for gap in gaps}


def gaps_of(server: str) -> Path:
    """``server``: name and version, joined by a hyphen."""
    return FOLDER / f"{server}.yaml"


def settle(check: Check, verdict: CheckVerdict, gaps: Mapping[str, Gap]) -> tuple[str, str]:
    """Verdict and reason once the known gaps are taken into account.

    A gap that passes is stale. A missed MUST that nobody excuses is ``must``, a missed SHOULD ``should``.
    """
    gap = gaps.get(check.check_id)
    if verdict.state in (UNTESTABLE, FAULTY):
        return verdict.state, verdict.reason
    if verdict.state == PASSED:
        return (STALE, f"passes, but is listed as a gap: {gap.reason}") if gap else (PASS, verdict.reason)
    if gap:
        return KNOWN, f"{gap.reason} ({verdict.reason})"
    return (MISSES_MUST if check.grade == MUST else MISSES_SHOULD), verdict.reason


FAILING = (MISSES_MUST, STALE)
