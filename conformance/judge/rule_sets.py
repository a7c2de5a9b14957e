"""Dated sets of rules: which checks there are, and how binding each is. A set that was released never changes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec

from conformance.judge.servers.check import Check

FOLDER = Path(__file__).parent / "rules"
SERVERS, TRAINERS = "servers", "trainers"


class RuleSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of ``rules``; a check that is sharpened gets another id, and the old one stays in the older sets."""

    about: str
    """What is new, for people."""
    servers: Mapping[str, str]
    """Check id -> MUST or SHOULD."""
    trainers: Mapping[str, str]

    def of(self, family: str) -> Mapping[str, str]:
        return self.servers if family == SERVERS else self.trainers


@cache
def rule_sets() -> Mapping[str, RuleSet]:
    """By date, the oldest first."""
    paths = sorted(FOLDER.glob("*.yaml"))
    return {path.stem: msgspec.yaml.decode(path.read_bytes(), type=RuleSet) for path in paths}


NEWEST = max(rule_sets())


def judged_by(rules: str, family: str, checks: Sequence[Check]) -> list[Check]:
    """Those of the set, in their order, at its levels. Errors: ``KeyError`` for another date."""
    levels = rule_sets()[rules].of(family)
    return [replace(check, grade=levels[check.check_id]) for check in checks if check.check_id in levels]


def came_in(family: str, check_id: str) -> str:
    """Date of the set in which a check came; empty for one that is in no set."""
    return next((date for date, rules in rule_sets().items() if check_id in rules.of(family)), "")


def changes() -> list[tuple[str, str, str, str]]:
    """Set, family, check and what became of it: its level, a new level, or ``removed``.

    >>> changes()[0][0]
    '2026-12'
    """
    first, *_ = rule_sets().items()
    rows = [(first[0], family, name, level) for family in FAMILIES for name, level in first[1].of(family).items()]
    for (_, old), (date, new) in pairwise(rule_sets().items()):
        for family in FAMILIES:
            was, now = old.of(family), new.of(family)
            rows += [(date, family, name, level) for name, level in now.items() if was.get(name) != level]
            rows += [(date, family, name, "removed") for name in was if name not in now]
    return rows


FAMILIES = (SERVERS, TRAINERS)
