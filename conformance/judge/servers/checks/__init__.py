"""All checks, in the order in which they run: dangerous ones last, and of these the ones that end the server."""

from collections.abc import Sequence

from conformance.judge.rule_sets import NEWEST, SERVERS, judged_by
from conformance.judge.servers.check import REGISTERED, Check
from conformance.judge.servers.checks import (  # noqa: F401
    adapters,
    calls,
    ends,
    generation,
    group,
    keys,
    liveness,
    numeric,
    pauses,
    process,
    routes,
    sampling,
    spans,
    tensors,
    updates,
    weights,
)

CHECKS: tuple[Check, ...] = tuple(sorted(REGISTERED, key=lambda each: (each.is_dangerous, "process" in each.needs)))
BY_ID = {each.check_id: each for each in CHECKS}
assert len(BY_ID) == len(CHECKS)


def checks_for(dialect: str, *, only: Sequence[str] = (), rules: str = NEWEST) -> list[Check]:
    """Checks of servers of this dialect in a rule set, at its levels; ``only`` names some."""
    asked = [each for each in CHECKS if dialect in each.dialects and (not only or each.check_id in only)]
    return judged_by(rules, SERVERS, asked)
