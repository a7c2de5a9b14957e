"""Rollouts beside learning: ages, empty responses; the prefetch only notes what it is asked."""

from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from conformance.doubles.refusals import refused
from rollmatch.rollout.overlap import Ahead, RequestedWindow, WithoutRollouts
from rollmatch.rollout.retry import ServerRestarted
from rollmatch.rollout.source import settle


def ahead_with(*, under_way=(), rollouts=(), max_staleness=2):
    prefetch = Mock(windows=dict.fromkeys(under_way))
    prefetch.collect.return_value = ([SimpleNamespace(policy_version=version) for version in rollouts], 3)
    return Ahead(Mock(), prefetch, max_staleness=max_staleness, lead=1), prefetch


def test_windows_that_are_not_under_way_are_requested_and_rollouts_are_counted_by_their_age():
    ahead, prefetch = ahead_with(under_way=(4,), rollouts=(9, 7, 9, 8))
    windows = [RequestedWindow(step, [step]) for step in (4, 5, 6)]
    sent_at = {6: 1, 7: 2, 8: 3, 9: 4}
    part, num_again = ahead.collect(windows, lambda samples, step: [step, *samples], step_of=sent_at)
    assert prefetch.submit.mock_calls == [call(5, [5, 5]), call(6, [6, 6])]
    prefetch.collect.assert_called_once_with(4, min_version=7)
    assert (part.staleness, num_again) == ({0: 2, 1: 1, 2: 1}, 3)


@pytest.mark.parametrize(("again", "is_noted"), [([0, 0], False), ([2, 0], True), ([0, 1], True)])
def test_what_was_too_old_and_requested_again_is_noted(again, is_noted):
    ahead, prefetch = ahead_with(under_way=(4,), rollouts=(9,))
    source = ahead.source
    source.fence.step_of, source.ranks.rank = {9: 4}, 0
    source.settle.side_effect = lambda attempt, step: (attempt(), again)[1]
    part = ahead.rollout([RequestedWindow(4, ["x"])])
    assert part.staleness == {0: 1}
    prefetch.forget.assert_called_once_with(4)
    noted = [call("asked_again", step=4, num_rollouts=again[0], by_rank=again)] * is_noted
    assert source.journal.write.mock_calls == noted


@pytest.mark.parametrize(("under_way", "waited"), [((), []), ((6, 5), [call(5)])])
def test_the_next_window_is_waited_for_also_where_its_server_was_restarted(under_way, waited):
    ahead, prefetch = ahead_with(under_way=under_way)
    prefetch.wait_for.side_effect = ServerRestarted("another process")
    ahead.wait_for_next()
    assert prefetch.wait_for.mock_calls == waited


def test_without_rollouts_each_response_is_empty_and_the_next_images_are_prepared():
    source = Mock(policy_version=3)
    source.ranks.rank, template = 2, source.template
    template.expand.side_effect = lambda ids, feature: (*ids, feature)
    template.prompt_token_ids.side_effect = lambda sample: (sample.sample_id,)
    template.preparation.collect.return_value = {0: 5, 1: 6}
    samples = [SimpleNamespace(sample_id=index) for index in (0, 1)]
    windows = [RequestedWindow(7, samples), RequestedWindow(8, ["later"])]
    part = WithoutRollouts(source).rollout(windows)
    assert template.preparation.begin.mock_calls == [call(["later"])]
    assert [(one.request_id, one.prompt_token_ids) for one in part.rollouts] == [("7.2.0", (0, 5)), ("7.2.1", (1, 6))]
    assert {(one.response_token_ids, one.finish_reason, one.policy_version) for one in part.rollouts} == {
        ((), "stop", 3)
    }
    assert part.features == {0: 5, 1: 6}


def failed(problem):
    return Mock(restarted="", failed=problem)


def test_a_rank_that_did_not_fail_names_the_first_one_that_did():
    ranks = Mock(rank=0)
    ranks.gather.side_effect = lambda own: [own, failed("too hot"), failed("too cold")]
    with refused("rank-failed", "rollout", problem="rank 1: too hot"):
        settle(lambda: "fine", ranks=ranks, fence=Mock(), journal=Mock())
