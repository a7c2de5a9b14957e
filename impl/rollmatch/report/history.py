"""A run's journal, read back: what still counts after interruptions and resumes."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollmatch.errors import DataError, LaunchError
from rollmatch.report.numbers import LARGEST, finite

Event = Mapping[str, Any]

JOURNAL_NAME = "journal.jsonl"
Place = tuple[int, int, str]
"""Step, rank and purpose of an event."""
WITH_STEP = frozenset(
    {
        "requested",
        "generated",
        "synced",
        "packed",
        "step",
        "evaluated",
        "saved",
        "timeline",
        "completions",
        "episodes",
    }
)
SHARED = frozenset({"requested", "generated", "packed", "timeline", "episodes"})
"""Kinds that every rank has of its own; the others are rank 0's word for the whole run."""
ROSTER = {"server_joined": "joined", "server_left": "left"}
"""Events of servers that come and go while a run is under way."""
ENDINGS = frozenset({"finished", "interrupted"})


class JournalLineBroken(DataError):
    """A terminated journal line is no JSON object with ``event``, and ``step`` where its kind has one."""

    code = "journal-line-broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The events that made the weights as they are now. Returned by ``load_history``, used by the page."""

    run: Event
    """The latest ``run`` event, empty if there is none."""
    ending: Event | None
    """``finished`` or ``interrupted``, if that is the last word."""
    steps: tuple[Event, ...]
    """``step`` events, one per optimizer step, ascending."""
    evaluations: tuple[Event, ...]
    """``evaluated`` events, one per step, ascending."""
    others: Mapping[str, tuple[Event, ...]]
    """Kind -> the latest event of each step, rank and purpose, ascending: requested, generated, synced, packed, ...;
    without what was generated to be evaluated."""
    roster: tuple[tuple[str, str, int], ...]
    """Server, joined or left, and the last optimizer step before."""
    num_starts: int
    """1 for an uninterrupted run."""
    num_lost_steps: int
    """Steps that a resume undid, whether or not they were run again."""
    duration_s: float
    """Time under way, summed over the starts; pauses between them do not count."""
    started_at: float | None
    """Unix seconds of the first event."""
    cut_off: bool
    """The last line was being written when the process ended; it is not part of this history."""

    @property
    def last_step(self) -> int:
        """Number of the last finished optimizer step, 0 before the first."""
        return int(self.steps[-1]["step"]) if self.steps else 0


def load_history(run_dir: Path) -> History:
    """Read ``journal.jsonl``. Errors: ``journal-missing``, ``JournalLineBroken``."""
    path = run_dir / JOURNAL_NAME
    if not path.is_file():
        raise LaunchError(
            f"{path} does not exist", code="journal-missing", key=str(path), remedy="Name the directory of a run."
        )
    events, cut_off = _read_events(path)
    return make_history(events, cut_off=cut_off)


def make_history(events: Iterable[Event], *, cut_off: bool = False) -> History:
    """Keep what counts: later events of a step and rank win; a resume from step n undoes the steps after n.

    Rank 0 speaks for the run: ``run``, ``step``, ``evaluated`` and endings of other ranks are passed over.

    >>> def step(number, loss):
    ...     return {"event": "step", "step": number, "loss": loss}
    >>> resume = {"event": "run", "resumed_from": 1}
    >>> history = make_history([step(1, 0.9), step(2, 0.8), step(3, 0.7), resume, step(2, 0.6)])
    >>> [(event["step"], event["loss"]) for event in history.steps], history.num_lost_steps
    ([(1, 0.9), (2, 0.6)], 2)
    """
    kept: dict[str, dict[Place, Event]] = {kind: {} for kind in WITH_STEP}
    own: list[Event] = []
    num_lost_steps = 0
    for event in events:
        rank = event.get("rank", 0)
        if rank == 0:
            own.append(event)
        if rank == 0 and event["event"] == "run":
            num_lost_steps += _undo_after(kept, event)
        elif event["event"] in (SHARED if rank else WITH_STEP) and event.get("purpose") != "eval":
            kept[event["event"]][event["step"], rank, str(event.get("purpose"))] = event
    ordered = {kind: tuple(by_place[place] for place in sorted(by_place)) for kind, by_place in kept.items()}
    runs = [event for event in own if event["event"] == "run"]
    return History(
        run=runs[-1] if runs else {},
        ending=own[-1] if own and own[-1]["event"] in ENDINGS else None,
        steps=ordered.pop("step"),
        evaluations=ordered.pop("evaluated"),
        others=ordered,
        roster=tuple(_roster_of(own)),
        num_starts=len(runs),
        num_lost_steps=num_lost_steps,
        duration_s=_duration_s(own),
        started_at=next((time for event in own if (time := finite(event.get("time"))) is not None), None),
        cut_off=cut_off,
    )


def _roster_of(own: Iterable[Event]) -> Iterator[tuple[str, str, int]]:
    last_step = 0
    for event in own:
        if event["event"] == "step":
            last_step = event["step"]
        elif event["event"] in ROSTER:
            yield str(event.get("server", "")), ROSTER[event["event"]], last_step


def _undo_after(kept: dict[str, dict[Place, Event]], run: Event) -> int:
    resumed_from = run.get("resumed_from")
    last_kept = -1 if resumed_from is None else resumed_from
    num_undone = sum(step > last_kept for step, _, _ in kept["step"])
    for kind, by_place in kept.items():
        kept[kind] = {place: event for place, event in by_place.items() if place[0] <= last_kept}
    return num_undone


def _duration_s(events: list[Event]) -> float:
    """Gaps between neighbouring events, without those in front of a (re)start and clock jumps backwards."""
    total = 0.0
    for earlier, later in pairwise(events):
        start, end = finite(earlier.get("time")), finite(later.get("time"))
        if later["event"] != "run" and start is not None and end is not None:
            total += max(0.0, end - start)
    return total


def _read_events(path: Path) -> tuple[list[Event], bool]:
    # Undecodable bytes become replacement characters, which JSON strings may hold: only pictures suffer.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    unterminated = lines.pop()
    events = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    return events, bool(unterminated.strip())


def _parse(line: str, origin: str) -> Event:
    try:
        event = json.loads(line)
    except json.JSONDecodeError as error:
        raise _broken(f"not JSON: {error.msg} at column {error.colno}", origin) from error
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise _broken('not an object with "event"', origin)
    if event["event"] in WITH_STEP and not _is_step(event.get("step")):
        raise _broken(f'"{event["event"]}" without a whole number as "step"', origin)
    if not _is_step(event.get("rank", 0)):
        raise _broken('"rank" is no whole number', origin)
    if event.get("resumed_from") is not None and not _is_step(event["resumed_from"]):
        raise _broken('"resumed_from" is neither a step nor null', origin)
    return event


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _broken(problem: str, origin: str) -> JournalLineBroken:
    return JournalLineBroken(problem, key=origin, remedy="Remove the line, or make the page from an intact copy.")
