"""Which checks a run asks, in which order."""

from collections.abc import Callable, Collection, Sequence

from conformance.judge.rule_sets import NEWEST
from conformance.judge.servers.check import Check
from conformance.judge.servers.checks import BY_ID, checks_for
from conformance.judge.servers.subject import KEY_VARIABLE

PROFILES = ("http", "weights", "full")


class UnknownCheck(ValueError):
    """A check that is named exists for the dialect."""


Lacks = Callable[[tuple[str, ...]], str]
"""What of a check's needs there is not; empty where all is there."""
OPTIONS = {"model": "--model", "ids": "--model", "group": "--transport", "key": KEY_VARIABLE}
BY_OPTIONS = {*OPTIONS, "process"}
"""Needs that a user can fulfil; others are of the model's kind."""


def checks_of(
    dialect: str,
    *,
    profile: str = "full",
    lacks: Lacks = lambda needs: "",
    dangerous: bool = False,
    only: Sequence[str] = (),
    rules: str = NEWEST,
) -> list[Check]:
    """``http``: calls alone, and answers beside transformers where there is a model. ``weights``: updates, too.

    ``full``: also what may stop the server, which the others add with ``dangerous``. What the model is not made for is
    left out, and what needs a key where there is none. ``only`` names checks of any profile, ``rules`` the set that
    says which checks there are. Errors: ``UnknownCheck``.
    """
    listed = checks_for(dialect, only=only, rules=rules)
    if missing := set(only) - {check.check_id for check in listed}:
        raise UnknownCheck(f"the {dialect} dialect has no check {', '.join(sorted(missing))} in the rules {rules}")
    if only:
        return in_order(listed)
    asked = [check for check in listed if "process" not in check.needs and not _is_foreign(check, lacks)]
    if profile != "full":
        asked = [check for check in asked if dangerous or not check.is_dangerous]
    if profile == "http":
        asked = [check for check in asked if "group" not in check.needs and not lacks(check.needs)]
    return in_order(asked)


def left_out(
    dialect: str, asked: Collection[Check], *, lacks: Lacks, dangerous: bool = False, rules: str = NEWEST
) -> dict[str, list[str]]:
    """Ids of checks that are not ``asked`` for want of something -> what a user would have to give."""
    others = [
        check for check in checks_for(dialect, rules=rules) if check not in asked and "process" not in check.needs
    ]
    wanting = {
        check.check_id: [option for need, option in OPTIONS.items() if need in check.needs and lacks((need,))]
        + ["--dangerous"] * (check.is_dangerous and not dangerous)
        for check in others
    }
    return {name: options for name, options in wanting.items() if options}


def _is_foreign(check: Check, lacks: Lacks) -> bool:
    """Whether the check is for servers with a key, or for models of another kind."""
    if "key" in check.needs and lacks(("key",)):
        return True
    kinds = tuple(need for need in check.needs if need not in BY_OPTIONS)
    return bool(kinds and not lacks(("model",)) and lacks(kinds))


def in_order(checks: Sequence[Check]) -> list[Check]:
    """Dangerous ones last; calls before updates; timed ones later; what a check requires before it."""

    def place(check: Check) -> tuple[int, ...]:
        return (check.is_dangerous, "process" in check.needs, "group" in check.needs, check.is_timed, depth(check))

    return sorted(checks, key=place)


def required_by(check: Check) -> tuple[str, ...]:
    """Also what every weight transfer builds on."""
    is_on_root = "group" in check.needs and check.check_id != ROOT_OF_TRANSFERS and "model" in check.needs
    return check.requires + ((ROOT_OF_TRANSFERS,) if is_on_root else ())


def depth(check: Check) -> int:
    """How many checks come before it at least."""
    return max((1 + depth(BY_ID[name]) for name in required_by(check)), default=0)


ROOT_OF_TRANSFERS = "a-group-opens-again"
