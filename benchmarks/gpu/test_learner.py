"""The learner's hot paths on a GPU, judged by their bars; samples go to ``benchmarks/results``."""

import pytest

from benchmarks.gpu.learner import RESULTS, run


@pytest.mark.gpu(1)
@pytest.mark.parametrize("path", ["masked_loss", "packed_pass", "decoder_layers"])
def test_a_path_meets_its_bars(benchmark, path):
    settings = {"kind": "full", "rounds": 15, "limit_s": 25.0, "out": RESULTS}
    bars = benchmark.pedantic(run, args=(path,), kwargs=settings, rounds=1)
    assert [name for name, bar in bars.items() if not bar["met"]] == []
