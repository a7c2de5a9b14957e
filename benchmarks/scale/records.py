"""What a run writes and says per step, by sizes of events of a recorded run, and counts that follow from the code."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scale.requests import Fleet
from rollmatch.rollout.work_items import cut_chunks

TRACE = Path(__file__).parents[2] / "fixtures/traces/h200-two-and-two.jsonl"
REQUEST_BYTES = 18
"""Of a request in an event that lists seeds and sample ids."""
EVERY_STEP = ("synced", "requested", "generated", "packed", "step", "timeline")
CALL_IN_TIMELINE_BYTES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Of one optimizer step."""

    control_calls: int
    """HTTP calls of a sync: announcement and, over gloo, commit, for each server."""
    store_messages: int
    """Of the group's store in a sync: a worker is ready, and asks for the verdict."""
    generate_calls: int
    health_calls_s: int
    """While all generate calls run: one a second and call."""
    journal_bytes: int
    """Of one rank."""


def records_of(fleet: Fleet, *, is_staged: bool) -> Records:
    """``is_staged``: over gloo, whose servers commit separately."""
    num_chunks = len(cut_chunks(fleet.requests_per_rank, fleet.num_servers, first=0))
    sizes = event_bytes()
    per_call = sizes["called"] - 16 * REQUEST_BYTES + CALL_IN_TIMELINE_BYTES  # the recorded run asks for 16 a call
    listed = (
        2 * REQUEST_BYTES * fleet.requests_per_rank - 2 * REQUEST_BYTES * 16 + REQUEST_BYTES * fleet.requests_per_rank
    )
    return Records(
        control_calls=fleet.num_servers * (2 if is_staged and fleet.num_servers > 1 else 1),
        store_messages=2 * fleet.num_servers,
        generate_calls=fleet.num_ranks * num_chunks,
        health_calls_s=fleet.num_ranks * num_chunks,
        journal_bytes=sum(sizes[name] for name in EVERY_STEP) + listed + num_chunks * per_call,
    )


def event_bytes() -> dict[str, int]:
    """Mean size of each kind of event in a journal of a real run."""
    sizes = defaultdict[str, list[int]](list)
    for line in TRACE.read_text().splitlines():
        sizes[json.loads(line)["event"]].append(len(line) + 1)
    return {kind: sum(found) // len(found) for kind, found in sizes.items()}
