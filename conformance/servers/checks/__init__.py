"""All checks, in the order in which they run: dangerous ones last."""

from collections.abc import Sequence

from conformance.servers.check import Check
from conformance.servers.checks import calls, generation, group, liveness, process, updates, weights

FILES = (liveness, generation, calls, group, weights, updates, process)
CHECKS: tuple[Check, ...] = tuple(
    sorted((check for file in FILES for check in file.CHECKS), key=lambda check: check.is_dangerous)
)
BY_ID = {check.check_id: check for check in CHECKS}
assert len(BY_ID) == len(CHECKS)


def checks_for(dialect: str, *, only: Sequence[str] = ()) -> list[Check]:
    """Those that a server of this dialect is asked; ``only`` names some."""
    return [check for check in CHECKS if dialect in check.dialects and (not only or check.check_id in only)]
