"""Verdicts as people read them: in the terminal, and as rows of the matrix."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.judge.servers.check import FAULTY, MUST, UNTESTABLE, Check
from conformance.judge.servers.checks import CHECKS
from conformance.judge.servers.exchange import Exchange, shown
from conformance.judge.servers.gaps import BLOCKED, FAILING

CAPABILITY = "servers"
MATRIX_VERDICTS = {"pass": "passed", "must": "failed", "should": "advice", "stale-gap": "failed"} | dict.fromkeys(
    ("blocked-by", "harness-error"), "not-testable"
)
"""State -> the matrix's word; what is left stays as it is."""
CONFORMS, MISSES, INCOMPLETE, NOT_JUDGED, JUDGE_FAILED = 0, 1, 3, 4, 5
"""Exit codes; 2 is wrong usage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow:
    """A check of one server, settled."""

    check: Check
    state: str
    reason: str
    seconds: float
    exchange: Exchange | None = None
    """What the verdict was made from; None where nothing was asked now."""
    num_asked: int = 1

    @property
    def fails(self) -> bool:
        return self.state in FAILING

    @property
    def line(self) -> str:
        """While judging."""
        return f"{self.state:14} {self.check.grade:6} {self.check.check_id:44} {self.seconds:6.1f} s"

    def __str__(self) -> str:
        return f"{self.line}  {shown(self.reason)}"


def summary(rows: Sequence[VerdictRow]) -> str:
    """How often each state.

    >>> summary([])
    'no checks'
    """
    states = [row.state for row in rows]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no checks"


def exit_code(
    rows: Sequence[VerdictRow], *, problem: str = "", is_restored: bool = True, is_finished: bool = True
) -> int:
    """What a run ends with; ``problem``: why the server could not be judged at all.

    >>> exit_code([], problem="nobody listens"), exit_code([]), exit_code([], is_restored=False)
    (4, 0, 5)
    """
    if problem:
        return NOT_JUDGED
    if any(row.fails for row in rows):
        return MISSES
    if not is_restored or any(row.state == FAULTY for row in rows):
        return JUDGE_FAILED
    is_whole = not any(row.state in (UNTESTABLE, BLOCKED) and row.check.grade == MUST for row in rows)
    return CONFORMS if is_whole and is_finished else INCOMPLETE


def left_out_of(not_asked: Mapping[str, Sequence[str]]) -> str:
    """How many checks a run left out, and the options that they need; empty where it asked all.

    >>> left_out_of({"a": ["--model"], "b": ["--model", "--dangerous"]}), left_out_of({})
    ('; 2 checks were not asked: 2 need --model, 1 need --dangerous', '')
    """
    counts = Counter(option for options in not_asked.values() for option in options)
    needs = ", ".join(f"{count} need {option}" for option, count in counts.items())
    return f"; {len(not_asked)} checks were not asked: {needs}" if counts else ""


def matrix_rows(judged: Iterable[tuple[str, str, Sequence[VerdictRow]]]) -> list[dict[str, Any]]:
    """One row a check; ``judged``: subject, date and rows of each server."""
    subjects = [(subject, date, {row.check.check_id: row for row in rows}) for subject, date, rows in judged]
    return [
        {
            "id": f"{CAPABILITY}/{check.check_id}",
            "capability": CAPABILITY,
            "name": check.check_id.replace("-", " "),
            "place": f"conformance/judge/servers/checks/{check.ask.__module__.rpartition('.')[2]}.py",
            "sentence": check.sentence,
            "tests": [],
            "faults": [],
            "cells": {
                subject: _cell(rows[check.check_id], date) for subject, date, rows in subjects if check.check_id in rows
            },
        }
        for check in CHECKS
    ]


def _cell(row: VerdictRow, date: str) -> Mapping[str, Any]:
    return {
        "verdict": MATRIX_VERDICTS.get(row.state, row.state),
        "date": date or time.strftime("%Y-%m-%d"),
        "device": "cpu",
        "seconds": row.seconds,
        "evidence": [f"{row.state} {row.reason}".strip()],
    }
