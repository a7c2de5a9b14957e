"""VinePPO as an objective: what it requests, what it learns from, and what it refuses."""

from dataclasses import replace

import pytest

from conformance.doubles.locks import (
    DECODING,
    VOCABULARY,
    RolloutSide,
    objective,
    prompt_of,
    sample_of,
    segments_of,
)
from conformance.doubles.records import make_rollout
from conformance.doubles.refusals import refused
from rollmatch.dialects.http import ServerRefused
from rollmatch.objectives.grpo.reward import Reward
from rollmatch.objectives.vineppo.single_turn import starts

SAMPLES = [sample_of(0), sample_of(1)]


def targets_of(side, made=None, *, samples=SAMPLES, ranks=None):
    rollouts = side.answer(samples)
    return (made or objective()).make_segments(samples, rollouts, side.context(ranks)), rollouts


@pytest.mark.scenario(clauses=["vineppo/a-value-is-the-plain-mean-of-fresh-continuations#3"])
def test_continuations_are_requested_by_the_rule_that_sampled_the_response():
    side = RolloutSide()
    targets_of(side)
    ((requests, decoding),) = side.calls
    fields = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty")
    assert [getattr(decoding, name) for name in fields] == [getattr(DECODING, name) for name in fields]
    assert {request.max_new_tokens + len(request.prefix_token_ids) for request in requests} == {6}
    assert {len(request.prefix_token_ids) for request in requests} == {0, 1, 2, 3, 4}
    assert {request.prompt_token_ids for request in requests} == {prompt_of(sample) for sample in SAMPLES}
    assert len({request.request_id for request in requests}) == len({request.seed for request in requests})


@pytest.mark.scenario(clauses=["vineppo/a-value-is-the-plain-mean-of-fresh-continuations#5"])
def test_only_responses_are_learnt_from():
    side = RolloutSide()
    targets, rollouts = targets_of(side)
    segments = segments_of(targets)
    assert [len(group) for group in targets.segments] == [2, 2]
    assert [segment.token_ids for segment in segments] == [
        (*rollout.prompt_token_ids, *rollout.response_token_ids, VOCABULARY.stop_id) for rollout in rollouts
    ]
    assert side.scored == [4]


@pytest.mark.scenario(
    "vineppo/a-server-error-stops-the-iteration", clauses=["vineppo/a-failed-generation-is-an-error#1,2"]
)
def test_a_server_error_stops_the_iteration():
    side = RolloutSide()

    def refuse(requests, decoding):
        error = ServerRefused("http://h:1/generate/ answered 500: out of memory", key="http://h:1")
        error.status = 500
        raise error

    rollouts, context = side.answer(SAMPLES), side.context()
    object.__setattr__(context, "generate", refuse)
    try:
        outcome = objective().make_segments(SAMPLES, rollouts, context)
    except ServerRefused as error:
        outcome = (error.code, error.status, error.problem)
    assert outcome == ("server-refused", 500, "http://h:1/generate/ answered 500: out of memory")
    assert side.notes == []
    assert objective().make_segments(SAMPLES, rollouts, side.context()).segments


def test_the_first_function_that_fails_is_named():
    def failing(error):
        def function(answer, sample):
            if sample.sample_id == 0:
                raise error
            return 1.0

        return Reward.of(function)

    made = objective()
    rewards = replace(made.rewards, rewards=(failing(KeyError("one")), failing(ValueError("two"))))
    with refused("reward-missing", "x:1", problem="KeyError: 'one'"):
        targets_of(RolloutSide(), replace(made, rewards=rewards))
    targets_of(RolloutSide(), replace(made, rewards=rewards), samples=SAMPLES[1:])


def test_the_first_128_answers_and_responses_are_written_down():
    side, samples = RolloutSide(), SAMPLES[:1] * 129
    evaluated = objective().evaluate(samples, side.answer(samples, num=1), side.context())
    assert (evaluated.metrics["num_scenes"], len(evaluated.record["answers"])) == (129.0, 128)
    objective().make_segments(samples[:65], side.answer(samples[:65]), side.context())
    ((_, note),) = side.notes
    assert (len(note["returns"]), len(note["values"]), len(note["advantages"])) == (130, 128, 128)


@pytest.mark.parametrize("unfinished", [None, 0.0, -1.0, 0.5])
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_response_without_its_end_is_paid_what_is_set_for_it_or_as_any_other(unfinished, is_finished):
    rules = objective(reward=lambda answer, sample: 3.0, unfinished_return=unfinished).rewards
    rollout = make_rollout((1, 2), finish_reason="stop" if is_finished else "length")
    (made,) = rules.trajectories(starts(SAMPLES[:1], [rollout], prompt_of), [rollout])
    assert made.total_return == (3.0 if is_finished or unfinished is None else unfinished)
