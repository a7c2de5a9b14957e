"""Ours beside its peer: both run in turn on the same machine, the ratio of their medians is the result."""

import os
import statistics
import time
from collections.abc import Callable

import pytest

from conformance.tools.gpus import num_gpus
from rollmatch.run.machine import set_environment

set_environment(eager=True)  # before torch and vLLM load

pytest_plugins = ["conformance.tools.gpus"]

RATIOS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strict-bars", action="store_true", help="fail where a bar of speed is missed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what needs GPUs that are not here, unless they are wanted by ``-m gpu``."""
    if (config.getoption("markexpr") or "").strip() == "gpu":
        return
    gone = [item for item in items if (marker := item.get_closest_marker("gpu")) and num_gpus() < marker.args[0]]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]
        config.stash.setdefault(RATIOS, []).append(f"NOT RUN: {len(gone)} benchmarks that need a GPU")


@pytest.fixture
def check_bar(request) -> Callable[[str, bool], None]:
    """``check_bar(line, is_met)``: a line for the end of the report; a missed bar fails with ``--strict-bars`` only.

    On a busy machine a ratio says little about the code.
    """

    def check(line: str, is_met: bool) -> None:
        shown = line if is_met else f"MISSED {line}"
        request.config.stash.setdefault(RATIOS, []).append(shown)
        assert is_met or not request.config.getoption("--strict-bars"), line

    return check


@pytest.fixture
def side_by_side(benchmark, request, check_bar):
    """``side_by_side(ours, peer, bar=4.0)``: how many times ours is as fast as the peer."""

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
        limit = "no bar" if bar is None else f"bar {bar:g} x"
        line = f"{request.node.name}: {ratio:.1f} x its peer ({limit}), {ours_s:.3g} s"
        check_bar(line, bar is None or ratio >= bar)
        return ratio

    return compare


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The ratios, which is what these files are for."""
    for line in config.stash.get(RATIOS, []):
        terminalreporter.write_line(line)
