"""Ours beside its peer: both run in turn on the same machine, the ratio of their medians is the result."""

import os
import statistics
import time
from collections.abc import Callable

import pytest

from rollmatch.cli.learner import set_environment

set_environment()  # before torch and vLLM load

pytest_plugins = ["conformance.gpus"]

RATIOS = pytest.StashKey[list[str]]()


@pytest.fixture
def tell(request) -> Callable[[str], None]:
    """A line for the end of the report."""
    return request.config.stash.setdefault(RATIOS, []).append


@pytest.fixture
def side_by_side(benchmark, request, tell):
    """``side_by_side(ours, peer, bar=4.0)``: how many times ours is as fast as the peer; fails below a bar."""

    def compare(ours: Callable[[], object], peer: Callable[[], object], *, bar: float | None, rounds: int = 3) -> float:
        peer_s: list[float] = []

        def time_peer() -> None:
            began = time.perf_counter()
            peer()
            peer_s.append(time.perf_counter() - began)

        benchmark.pedantic(ours, setup=time_peer, rounds=rounds, warmup_rounds=0)
        ours_s = statistics.median(benchmark.stats.stats.data)
        ratio = statistics.median(peer_s) / ours_s
        benchmark.extra_info |= {"peer_s": peer_s, "ratio": ratio, "bar": bar, "cores": os.cpu_count()}
        told = "no bar" if bar is None else f"bar {bar:g} x"
        line = f"{request.node.name}: {ratio:.1f} x its peer ({told}), {ours_s:.3g} s"
        tell(line)
        assert bar is None or ratio >= bar, line
        return ratio

    return compare


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The ratios, which is what these files are for."""
    for line in config.stash.get(RATIOS, []):
        terminalreporter.write_line(line)
