"""Figures of a simulated run at sizes that nobody here has: ``python -m benchmarks.scale.table [write]``.

``write`` fills the block of ``docs/scale.md``; every figure follows from code and rates, so that two runs agree.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.scale.fan_out import WAYS, Network, sync_s
from benchmarks.scale.pages import page_bytes
from benchmarks.scale.records import records_of
from benchmarks.scale.requests import Fleet, load_of, spread, together
from rollmatch.plan.rates import load_rates
from rollmatch.weights.gloo import BUCKET_BYTES, MAX_IN_FLIGHT

PAGE = Path(__file__).parents[2] / "docs/scale.md"
BEGIN, END = "<!-- simulated -->", "<!-- end -->"
WEIGHT_BYTES = 16.4e9
"""8B in bfloat16."""
HOP_S = 50e-6
"""Assumed: a message between two machines, and the wake-up of the one that passes it on."""
SERVERS = (1, 4, 16, 64, 256, 1000)
PAGES = ((100, 4), (1000, 4), (10000, 4), (1000, 64), (1000, 1000))
"""Optimizer steps and servers."""
FLEETS = (
    Fleet(num_servers=4, num_ranks=2, requests_per_rank=256),
    Fleet(num_servers=64, num_ranks=16, requests_per_rank=256),
    Fleet(num_servers=1000, num_ranks=256, requests_per_rank=256),
    Fleet(num_servers=1000, num_ranks=256, requests_per_rank=1000),
)


def network() -> Network:
    """One adapter per machine, as ``rollmatch plan`` assumes it."""
    return Network(
        link_bytes_s=load_rates().links.between_nodes_bytes_s,
        hop_s=HOP_S,
        bucket_bytes=BUCKET_BYTES,
        num_in_flight=MAX_IN_FLIGHT,
    )


def slowdown(way: str, num_servers: int, *, base: int = 4, num_bytes: float = WEIGHT_BYTES) -> float:
    """A sync's time, in times of the one to ``base`` servers."""
    times = [sync_s(way, count, num_bytes=num_bytes, network=network()) for count in (num_servers, base)]
    return times[0] / times[1]


def tables(max_servers: int = 1000, max_steps: int = 10_000) -> Iterator[str]:
    """All figures up to these sizes, in Markdown. The largest runs take most of the time."""
    fleets = [fleet for fleet in FLEETS if fleet.num_servers <= max_servers]
    yield from _fan_out([count for count in SERVERS if count <= max_servers])
    yield ""
    yield from _loads(fleets)
    yield ""
    yield from _records(fleets)
    yield ""
    yield from _head("optimizer steps", "servers", "page, kB")
    for steps, servers in PAGES:
        if steps <= max_steps and servers <= max_servers:
            yield _row(steps, servers, f"{page_bytes(steps, servers) / 1e3:.0f}")


def _fan_out(servers: Sequence[int]) -> Iterator[str]:
    yield from _head("servers", *(f"{way}, s" for way in WAYS), *(f"{way} / to 4" for way in WAYS))
    times = {(way, n): sync_s(way, n, num_bytes=WEIGHT_BYTES, network=network()) for way in WAYS for n in servers}
    for count in servers:
        seconds = [f"{times[way, count]:.2f}" for way in WAYS]
        yield _row(count, *seconds, *(f"{times[way, count] / times[way, 4]:.2f}" for way in WAYS))


def _loads(fleets: Sequence[Fleet]) -> Iterator[str]:
    heads = (
        "generate calls",
        "most requests of a server",
        "idle servers",
        "rollout, s",
        "efficiency",
        "if all began with server 0",
    )
    yield from _head("servers", "ranks", "requests a rank", *heads)
    for fleet in fleets:
        now, crowded = load_of(fleet, spread), load_of(fleet, together)
        counts = (now.num_calls, now.most_requests, now.num_idle)
        shares = (f"{now.seconds:.1f}", f"{now.efficiency:.2f}", f"{crowded.efficiency:.2f}")
        yield _row(fleet.num_servers, fleet.num_ranks, fleet.requests_per_rank, *counts, *shares)


def _records(fleets: Sequence[Fleet]) -> Iterator[str]:
    heads = ("sync calls (gloo)", "store messages", "generate calls", "health calls/s", "journal of a rank, kB")
    yield from _head("servers", "ranks", "requests a rank", *heads)
    for fleet in fleets:
        found = records_of(fleet, is_staged=False)
        staged = records_of(fleet, is_staged=True).control_calls
        calls = (f"{found.control_calls} ({staged})", found.store_messages, found.generate_calls, found.health_calls_s)
        sizes = (fleet.num_servers, fleet.num_ranks, fleet.requests_per_rank)
        yield _row(*sizes, *calls, f"{found.journal_bytes / 1e3:.1f}")


def _head(*names: str) -> Sequence[str]:
    return _row(*names), _row(*("---" for _ in names))


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def filled(page: str) -> str:
    """The page with these figures."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n" + "\n".join(tables()) + f"\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        PAGE.write_text(filled(PAGE.read_text()))
    sys.stdout.write("\n".join(tables()) + "\n")
