"""What checks of trainers read in the events of a run."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from conformance.judge.servers.exchange import Exchange
from conformance.judge.trainers.arrivals import Event, after, of_kind, rounds_of
from conformance.judge.trainers.runs import AGAIN

BAR = re.compile(r"\d+%\|")


def events_of(exchange: Exchange) -> list[Event]:
    return list(exchange.notes["events"])


def wrong_in(exchange: Exchange, name: str, what: str, *, only_first: bool = False) -> str:
    """The first update (or the first of all) that has something under ``name``."""
    updates = of_kind(events_of(exchange), "update")[: 1 if only_first else None]
    found = [
        f"update {number}: {what}: {', '.join(event[name])}" for number, event in enumerate(updates, 1) if event[name]
    ]
    if not updates:
        return "no update came"
    return found[0] if found else ""


def unlike(exchange: Exchange, read: Callable[[Sequence[Event]], Any], what: str) -> str:
    """The first round that differs between two runs."""
    first, second = (rounds_of(exchange.notes[name]) for name in ("events", f"{AGAIN}_events"))
    if len(first) != len(second):
        return f"{len(first)} rounds in the first run, {len(second)} in the second"
    wrong = [number for number, (one, other) in enumerate(zip(first, second, strict=True)) if read(one) != read(other)]
    return f"after update {wrong[0]} the {what} are not those of the first run" if wrong else ""


def disturbed(exchange: Exchange) -> Event:
    """The call for rollouts that the fault hit."""
    return next(event for event in events_of(exchange) if event.get("fault"))


def repeats(exchange: Exchange) -> list[Event]:
    """Later calls of the same round that ask for a prompt of the disturbed one, with its seed."""
    hit, found = disturbed(exchange), []
    for event in after(events_of(exchange), hit):
        if event["kind"] == "update":
            break
        if event["kind"] == "generate" and requests_of(event) & requests_of(hit):
            found.append(event)
    return found


def requests_of(event: Event) -> set[tuple[str, int | None]]:
    """Prompts with their seeds; without seeds, copies of a prompt cannot be distinguished.

    >>> sorted(requests_of({"prompts": ["a", "b"], "seeds": [3]}))
    [('a', 3), ('b', 3)]
    """
    prompts, seeds = event["prompts"], event["seeds"]
    return set(zip(prompts, seeds * len(prompts) if len(seeds) == 1 else seeds, strict=True))


def since_restart(exchange: Exchange) -> Iterator[Event]:
    events = events_of(exchange)
    return after(events, next(event for event in events if event["kind"] == "restart"))


def ended(code: int | None) -> str:
    """In words.

    >>> ended(1), ended(None)
    ('the run ended with 1', 'the run did not end in time')
    """
    return "the run did not end in time" if code is None else f"the run ended with {code}"


def last_line(exchange: Exchange) -> str:
    """Of what the trainer wrote; a progress bar only where there is nothing else."""
    lines = [line.strip() for line in exchange.notes["output"].splitlines() if line.strip()]
    written = [line for line in lines if not BAR.search(line)]
    return (written or lines or ["no output"])[-1]
