"""A step's requests on many servers: who gets how many, and how long the last one takes.

Requests are cut by the code that runs. An engine generates all of its requests at once, at the rates of
``rollmatch plan``.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from rollmatch.plan.rates import decode_tok_s, load_rates
from rollmatch.rollout.work_items import cut_chunks, first_server

MEAN_TOKENS, SIGMA = 500, 0.6
"""Of a response's length, log-normal."""
GPU = "H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoad:
    """A step on all servers."""

    num_calls: int
    """Generate calls of all ranks."""
    most_requests: int
    """Of one server."""
    num_idle: int
    """Servers without a request."""
    seconds: float
    efficiency: float
    """Share of the servers' time in which they generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Servers of one engine each, and learner ranks, each with its own requests."""

    num_servers: int
    num_ranks: int
    requests_per_rank: int


def spread(fleet: Fleet, rank: int) -> int:
    """As it runs."""
    return first_server(rank, fleet.num_ranks, fleet.num_servers)


def together(fleet: Fleet, rank: int) -> int:
    """For comparison: every rank gives its first chunk to the first server."""
    return 0


def load_of(fleet: Fleet, begin: Callable[[Fleet, int], int]) -> RequestLoad:
    """One step, whose ranks begin with the servers that ``begin`` names."""
    draw, held, num_calls = random.Random(fleet.num_servers), [list[int]() for _ in range(fleet.num_servers)], 0
    for rank in range(fleet.num_ranks):
        chunks = cut_chunks(fleet.requests_per_rank, fleet.num_servers, first=begin(fleet, rank))
        num_calls += len(chunks)
        for chunk in chunks:
            server = held[chunk.server_index]
            server += [round(MEAN_TOKENS * draw.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)) for _ in range(*chunk[1:])]
    busy = [generation_s(lengths) for lengths in held]
    return RequestLoad(
        num_calls=num_calls,
        most_requests=max(map(len, held)),
        num_idle=sum(not lengths for lengths in held),
        seconds=max(busy),
        efficiency=sum(busy) / len(busy) / max(busy),
    )


def generation_s(lengths: list[int]) -> float:
    """Until the longest response of one engine has ended."""
    seconds, written = 0.0, 0
    for place, length in enumerate(sorted(lengths)):
        num_running = len(lengths) - place
        seconds += (length - written) * num_running / _tok_s(num_running)
        written = length
    return seconds


@cache
def _tok_s(num_requests: int) -> float:
    return decode_tok_s(load_rates(), GPU, num_requests=num_requests)
