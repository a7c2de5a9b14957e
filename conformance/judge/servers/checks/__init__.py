"""All checks, in the order in which they run: dangerous ones last, and of these the ones that end the server."""

from collections.abc import Sequence

from conformance.judge.rule_sets import NEWEST, SERVERS, judged_by
from conformance.judge.servers.check import REGISTERED, Check
from conformance.judge.servers.checks import (
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

_BEFORE_UPDATES = (generation, liveness, calls, numeric, sampling, ends, adapters, keys, routes, pauses)
_OF_UPDATES = (weights, group, tensors, spans, updates, process)
"""Behind the others, which ask for the weights that the server was found with."""
_ORDER = [module.__name__ for module in (*_BEFORE_UPDATES, *_OF_UPDATES)]


def _place(check: Check) -> tuple[bool, bool, int]:
    return check.is_dangerous, "process" in check.needs, _ORDER.index(check.judge.__module__)


CHECKS: tuple[Check, ...] = tuple(sorted(REGISTERED, key=_place))
BY_ID = {each.check_id: each for each in CHECKS}
assert len(BY_ID) == len(CHECKS)


def checks_for(dialect: str, *, only: Sequence[str] = (), rules: str = NEWEST) -> list[Check]:
    """Checks of servers of this dialect in a rule set, at its levels; ``only`` names some."""
    asked = [each for each in CHECKS if dialect in each.dialects and (not only or each.check_id in only)]
    return judged_by(rules, SERVERS, asked)
