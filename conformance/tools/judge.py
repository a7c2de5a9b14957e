"""One checker for the events of any run: simulated, on a CPU or on GPUs.

Events are lines of a journal (``rollmatch.journal.Journal`` writes them), of all ranks together:

=============  ==============================================  ==================================================
``event``      fields beside ``time`` (unix s) and ``rank``    what happened
=============  ==============================================  ==================================================
``barrier``    ``step``                                        the rank passed a barrier (simulated runs only)
``synced``     ``step``, ``version``, ``seconds``              a sync of that rank has ended
``requested``  ``step``                                        rollouts were requested
``generated``  ``step``, ``policy_version``, ``seconds``       they came back
``timeline``   ``step``, ``calls``                             calls beside learning, as [server, begin, end, step]
``restarted``  nothing                                         a server lost its weights: the step is synced again
``sync_repeated``  ``version``                                 a push failed; the next one has this version
``server_joined``  ``policy_version``                          a server with that version came; the next one is newer
=============  ==============================================  ==================================================

With ``max_staleness`` above 0, a step may be requested that many steps ahead, and weights may be that old. Other events
are ignored. A ``run`` event starts over: versions continue from those of the servers, the same for all ranks.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]
FIELDS: Mapping[str, tuple[str, ...]] = {
    "barrier": ("step",),
    "synced": ("step", "version", "seconds"),
    "requested": ("step",),
    "generated": ("step", "policy_version", "seconds"),
    "timeline": ("step", "calls"),
    "server_joined": ("policy_version",),
}
"""The schema: event -> fields that it has beside ``time`` and ``rank``."""
SLACK_S = 0.005
"""Times are rounded to a millisecond and written just after the event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One broken rule."""

    rule: str
    rank: int
    index: int
    """Of the event among all."""
    problem: str


@dataclass(slots=True)
class _Seen:
    """What one rank has done so far."""

    first_version: int | None = None
    version: int = 0
    step: int | None = None
    asked_since: bool = True
    may_repeat: bool = False
    """Whether the step may be synced again."""
    steps: dict[int, int] = field(default_factory=dict)
    """Version -> the step whose weights it holds."""
    barriers: int = 0
    spans: list[tuple[float, float, str, int]] = field(default_factory=list)


def judge(events: Iterable[Event], *, max_staleness: int = 0) -> list[Breach]:
    """Every broken rule, in the order of events; empty when the run kept its fence."""
    listed = list(events)
    breaches = list(_check_schema(listed))
    if breaches:
        return breaches
    ranks: dict[int, _Seen] = {}
    joined = frozenset(event["policy_version"] for event in listed if event["event"] == "server_joined")
    for index, event in enumerate(listed):
        rank = int(event.get("rank", 0))
        if event["event"] == "run":
            ranks[rank] = _Seen()
        seen = ranks.setdefault(rank, _Seen())
        breaches += [
            Breach(rule=rule, rank=rank, index=index, problem=problem)
            for rule, problem in _take(event, seen, index, max_staleness, joined)
        ]
    return [*breaches, *_check_first_versions(ranks), *_check_barriers(ranks), *_check_overlaps(ranks)]


def _check_schema(events: list[Event]) -> Iterator[Breach]:
    for index, event in enumerate(events):
        missing = [name for name in (*FIELDS.get(event.get("event", ""), ()), "event", "time") if name not in event]
        if missing:
            problem = f"{event.get('event', 'a line')} lacks {', '.join(missing)}"
            yield Breach(rule="schema", rank=int(event.get("rank", 0)), index=index, problem=problem)


def _take(event: Event, seen: _Seen, index: int, staleness: int, joined: Collection[int]) -> Iterator[tuple[str, str]]:
    """Rules of one rank by itself; ``joined``: versions of servers that came later, which rank 0 alone writes down."""
    kind = event["event"]
    if kind == "timeline":
        seen.spans += [(begin, end, "generated", index) for _, begin, end, *_ in event["calls"]]
    is_repeated = kind == "synced" and seen.may_repeat  # inside the generation that a restart has broken
    if (kind == "synced" and not is_repeated) or (kind == "generated" and not staleness):  # else: timeline
        seen.spans.append((event["time"] - event["seconds"], event["time"], kind, index))
    if kind == "barrier":
        seen.barriers += 1
    elif kind == "synced":
        if seen.first_version is None:
            seen.first_version = event["version"]
        elif event["version"] - 1 not in {seen.version, *(each for each in joined if each > seen.version)}:
            yield "version", f"version {event['version']} follows version {seen.version}"
        if event["step"] == seen.step and not seen.may_repeat:
            yield "once-per-step", f"step {event['step']} was synced before"
        if not seen.asked_since and not staleness and not seen.may_repeat:
            yield "needless-sync", f"nothing was requested since version {seen.version}"
        seen.steps[event["version"]] = event["step"]
        seen.version, seen.step, seen.asked_since = event["version"], event["step"], is_repeated
        seen.may_repeat = False
    elif kind == "restarted":
        seen.may_repeat = True
    elif kind == "sync_repeated":
        seen.version = event["version"] - 1
    elif kind == "requested":
        if seen.step is None or not 0 <= event["step"] - seen.step <= staleness:
            yield "sync-before-request", f"rollouts of step {event['step']} with weights of step {seen.step}"
        seen.asked_since = True
    elif kind == "generated" and not _is_new(seen.steps, event["policy_version"], staleness):
        yield "newest-weights", f"version {event['policy_version']} wrote, version {seen.version} was synced"


def _is_new(steps: Mapping[int, int], version: int, staleness: int) -> bool:
    """Whether at most ``staleness`` steps were synced after the one whose weights ``version`` holds.

    >>> _is_new({1: 0, 2: 0, 3: 1}, 1, 1), _is_new({1: 0, 2: 0, 3: 1}, 2, 0)
    (True, False)
    """
    later = {step for each, step in steps.items() if each > version}
    return version in steps and len(later - {steps[version]}) <= staleness


def _check_first_versions(ranks: Mapping[int, _Seen]) -> Iterator[Breach]:
    """Above 0, which no sync has made, and the same everywhere."""
    first = {rank: seen.first_version for rank, seen in ranks.items() if seen.first_version is not None}
    if len(set(first.values())) > 1 or min(first.values(), default=1) < 1:
        yield Breach(rule="version", rank=min(first), index=-1, problem=f"first versions by rank: {first}")


def _check_barriers(ranks: Mapping[int, _Seen]) -> Iterator[Breach]:
    counts = {rank: seen.barriers for rank, seen in ranks.items()}
    if len(set(counts.values())) > 1:
        problem = f"barriers by rank: {counts}"
        yield Breach(rule="barriers", rank=min(counts, key=lambda rank: counts[rank]), index=-1, problem=problem)


def _check_overlaps(ranks: Mapping[int, _Seen]) -> Iterator[Breach]:
    """No rank generates while any rank syncs; one machine's clock."""
    syncs = [(*span, rank) for rank, seen in ranks.items() for span in seen.spans if span[2] == "synced"]
    for rank, seen in ranks.items():
        for start, end, _, index in (span for span in seen.spans if span[2] == "generated"):
            for begun, ended, _, _, other in syncs:
                if start + SLACK_S < ended and begun + SLACK_S < end:
                    yield Breach(rule="fence", rank=rank, index=index, problem=f"generated while rank {other} synced")
