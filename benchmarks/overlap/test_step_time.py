"""Optimizer steps with overlap beside steps without, on a real server: R and L within a factor of two, a core each.

A minute on a quiet machine with two cores; with ``OVERLAP_STEPS=12 OVERLAP_ROUNDS=2``, for a figure to report, eight.
"""

import os
import statistics

import pytest

from benchmarks.overlap.pinned import MATCHING, MODES, pinned_server
from benchmarks.overlap.steps import busy, samples_of, steps_of

NUM_STEPS, NUM_WARM_UP = int(os.environ.get("OVERLAP_STEPS", "5")), 3
NUM_ROUNDS = int(os.environ.get("OVERLAP_ROUNDS", "1"))
BAR = 1.3
TAIL = 1
"""The last steps have nothing left to ask for ahead of time."""
MEASURED = {"num_warm_up": NUM_WARM_UP, "tail": TAIL}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Journals by mode, each mode once in every round."""
    folder = tmp_path_factory.mktemp("overlap")
    journals = {mode: [] for mode in MODES}
    with pinned_server(folder) as server:
        for number in range(NUM_ROUNDS):
            for mode in MODES:
                settings = (f"{MATCHING}.overlap={mode}", f"training.max_steps={NUM_WARM_UP + NUM_STEPS + TAIL}")
                journals[mode].append(server.learn(folder / f"{mode}-{number}", *settings, "training.eval_scenes=1"))
    return journals


def test_the_case_is_one_that_overlap_can_help(runs, check_bar):
    for journal in runs["off"]:
        rollout_s, learn_s = (busy(journal, name, **MEASURED) for name in ("rollout_s", "learn_s"))
        check_bar(f"overlap: rollout / learning {rollout_s / learn_s:.2f}", 0.5 < rollout_s / learn_s < 2)


def test_all_modes_learn_from_the_same_samples(runs):
    (expected,) = {str(samples_of(journal)) for journal in runs["off"]}
    assert {str(samples_of(journal)) for mode in MODES for journal in runs[mode]} == {expected}


def test_a_step_ahead_beside_one_without_overlap(runs, benchmark, check_bar):
    off, ours = (
        [second for journal in runs[name] for second in steps_of(journal, **MEASURED)] for name in ("off", "ahead")
    )
    assert len(ours) == len(off) == NUM_ROUNDS * NUM_STEPS
    ratio = statistics.median(off) / statistics.median(ours)
    rollout_s, learn_s = (busy(runs["off"][0], name, **MEASURED) for name in ("rollout_s", "learn_s"))
    line = f"overlap ahead: {ratio:.2f} x off (bar {BAR}), {statistics.median(ours):.3g} s a step"
    line += f"; off {statistics.median(off):.3g} s, R {rollout_s:.3g} s, L {learn_s:.3g} s"
    benchmark.extra_info |= {"ratio": ratio, "bar": BAR, "off_s": off, "ours_s": ours, "R_s": rollout_s, "L_s": learn_s}
    benchmark.pedantic(lambda: None, rounds=1)
    check_bar(line, ratio >= BAR)
