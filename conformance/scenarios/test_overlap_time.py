"""How much of the longer side's time a step takes: real prefetch and fence on a virtual clock, times of a real run."""

import json
from pathlib import Path

import pytest

from conformance.scenarios.timed_overlap import Recorded, TimedRun, stream_bound

RECORDINGS = Path(__file__).parents[2] / "fixtures" / "recorded" / "overlap"
FORWARD_SHARE = 1 / 3
"""A backward pass costs twice a forward pass."""


def recorded(*, slowdown, num_servers, num_parts=None):
    """The recording, with servers that take ``slowdown`` times as long."""
    told = json.loads((RECORDINGS / "digits.json").read_text())
    return Recorded(
        num_servers=num_servers,
        num_parts=num_parts or told["num_parts"],
        finish_s=tuple(tuple(slowdown * seconds for seconds in step) for step in told["finish_s"]),
        learn_s=tuple(told["learn_s"]),
        sync_s=told["sync_s"],
        forward_share=FORWARD_SHARE,
    )


@pytest.fixture(scope="module", params=[(1, 1), (2, 1), (2, 3), (4, 3)])
def times(request):
    slowdown, num_servers = request.param
    return recorded(slowdown=slowdown, num_servers=num_servers)


def test_asking_one_step_ahead_takes_the_longer_of_rollout_and_learning(times):
    run, steps = TimedRun(times, "ahead"), range(len(times.learn_s) - 1)
    assert run.stuck == []
    longer = sum(max(times.rollout_s(step + 1), times.learn_s[step]) for step in steps)
    spent = run.begins[-1] - times.rollout_s(0) - times.learn_s[-1]  # less the first and the last half step
    assert longer + times.sync_s * len(times.learn_s) >= 0.98 * spent, "but for the syncs, nobody waits in vain"
    assert longer >= 0.97 * spent, "of steps of four seconds, with a tenth of a second for each sync"


def test_streaming_takes_what_a_learner_takes_that_never_waits_in_vain(times):
    run, steps = TimedRun(times, "stream"), range(len(times.learn_s))
    assert run.stuck == []
    own = sum(stream_bound(times, step, early_factor=times.early_factor) for step in steps)
    assert own >= 0.98 * sum(run.step_s)
    least = sum(stream_bound(times, step) for step in steps)
    assert least >= 0.88 * sum(run.step_s), "what two backward passes cost a learner that is the longer side"


def test_streaming_with_all_graphs_kept_takes_second_backward_passes_only_while_nothing_else_is_to_be_done(times):
    steps = range(len(times.learn_s))
    one, all_kept = (sum(TimedRun(times, "stream", graphs_kept=number).step_s) for number in (1, times.num_parts))
    least = sum(stream_bound(times, step) for step in steps)
    assert all_kept <= one
    assert least + times.sync_s * len(steps) >= 0.925 * all_kept


@pytest.mark.parametrize(("slowdown", "bar"), [(1, 0.955), (2, 0.94), (4, 0.955)])
def test_smaller_micro_batches_bring_it_nearer_to_what_no_learner_is_faster_than(slowdown, bar):
    times = recorded(slowdown=slowdown, num_servers=1, num_parts=8)
    steps = range(len(times.learn_s))
    least = sum(stream_bound(times, step) + times.sync_s for step in steps)
    assert least >= bar * sum(TimedRun(times, "stream", graphs_kept=8).step_s)


@pytest.mark.parametrize(("mode", "gain"), [("stream", 1.05), ("ahead", 1.3)])
def test_both_modes_beat_waiting_for_everything(times, mode, gain):
    off, beside = TimedRun(times, "off"), TimedRun(times, mode)
    assert sum(off.step_s) > gain * sum(beside.step_s)
    assert len(off.step_s) == len(beside.step_s) == len(times.learn_s)


def test_more_staleness_ends_too_but_its_syncs_wait_for_calls_of_later_steps(times):
    one, two = (TimedRun(times, "ahead", max_staleness=staleness) for staleness in (1, 2))
    assert two.stuck == []
    assert sum(two.step_s) <= 1.15 * sum(one.step_s)
