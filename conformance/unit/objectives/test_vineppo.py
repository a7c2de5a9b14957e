"""VinePPO as an objective: what it requests, what it learns from, and what it refuses."""

from dataclasses import replace

import pytest

from conformance.doubles.ladders import climbing
from conformance.doubles.locks import (
    DECODING,
    VOCABULARY,
    RolloutSide,
    objective,
    prompt_of,
    sample_of,
    segments_of,
)
from conformance.doubles.ranks import together
from conformance.doubles.refusals import refused
from rollmatch.dialects.http import ServerRefused
from rollmatch.objectives.grpo.reward import Reward
from rollmatch.objectives.vineppo.objective import TrajectoryReport, WindowReport

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


def test_a_reward_that_fails_for_one_response_is_an_error():
    def picky(answer, sample):
        if answer.startswith("AA"):
            raise KeyError(answer)
        return 1.0

    side = RolloutSide()
    with refused("reward-missing") as caught:
        targets_of(side, objective(reward=picky))
    assert caught.value.key in ("x:1", "x:2")
    targets_of(side)


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


def test_two_ranks_share_their_requests():
    sides = [RolloutSide(), RolloutSide()]
    targets_by_rank = together(2, lambda member: targets_of(sides[member.rank], samples=SAMPLES, ranks=member)[0])
    alone_side = RolloutSide()
    targets, _ = targets_of(alone_side)
    counts = [len(side.calls[0][0]) for side in sides]
    assert sum(counts) == len(alone_side.calls[0][0])
    assert [h.segments for h in targets_by_rank] == [targets.segments] * 2


def test_figures_of_what_values_cost():
    side = RolloutSide()
    made = objective()
    targets, _ = targets_of(side, made)
    figures = made.summarize(targets.reports)
    assert figures["continuations"] == len(side.calls[0][0])
    assert figures["steps"] == 5
    assert 0 <= figures["reward"] <= 1
    ((event, note),) = side.notes
    assert event == "valued"
    assert len(note["returns"]) == len(note["sample_ids"]) == 4
    evaluated = made.evaluate(SAMPLES, side.answer(SAMPLES, num=1), side.context())
    assert evaluated.metrics["num_scenes"] == 2.0


def test_figures_are_means_over_responses_and_sums_of_what_their_values_cost():
    fields = {"total_return": 1.0, "response_len": 3, "is_truncated": True, "num_turns": 1}
    one = TrajectoryReport(values=(0.25, 0.5), step_advantages=(-1.0, 0.5), **fields)
    other = TrajectoryReport(values=(0.75,), step_advantages=(0.0,), **fields | {"num_turns": 4, "is_truncated": False})
    cost = WindowReport(num_states=6, num_continuations=8, continuation_tokens=20)
    expected = {
        "reward": 1.0, "truncated_rate": 0.5, "response_len": 3, "steps": 1.5, "prompt_value": 0.5,
        "advantage_size": 0.5, "continuations": 16.0, "continuation_tokens": 40.0, "states_per_continuation": 0.75,
    }  # fmt: skip
    assert objective().summarize((one, other, cost, cost)) == expected
    assert climbing().summarize((one, other, cost, cost)) == expected | {"turns": 2.5, "reward_failed_rate": 0.0}
    assert objective().summarize(()) == objective().summarize((cost,)) == {}


@pytest.mark.parametrize(("length", "response_len", "paid"), [(4, 4, 1.0), (9, 6, 0.5)])
def test_what_is_reported_of_a_response_and_its_continuations(length, response_len, paid):
    """Four letters and a stop token, or six letters, the limit; each continuation ends as its response does."""
    side, made = (
        RolloutSide(length=length),
        objective(reward=lambda *_: 1.0, unfinished_return=0.5, num_continuations=2),
    )
    targets, _ = targets_of(side, made, samples=SAMPLES[:1])
    *reports, cost = targets.reports
    num_steps = response_len + (length == 4)
    assert reports == 2 * [
        TrajectoryReport(
            total_return=paid, response_len=response_len, is_truncated=length == 9, num_turns=1,
            values=(paid,) * num_steps, step_advantages=(0.0,) * num_steps,
        )
    ]  # fmt: skip
    positions = [len(request.prefix_token_ids) for request in side.calls[0][0]]
    assert cost == WindowReport(
        num_states=2 * num_steps,
        num_continuations=len(positions),
        continuation_tokens=sum(num_steps - position for position in positions),
    )
    assert targets.num_rollout_tokens == 2 * response_len
    ((_, note),) = side.notes
    assert note["values"] == [[paid] * num_steps] * 2
    evaluated = made.evaluate(SAMPLES[:1], side.answer(SAMPLES[:1], num=1), side.context())
    assert evaluated.metrics == {"reward": paid, "num_scenes": 1.0}
    assert [one["reward"] for one in evaluated.record["answers"]] == [paid]


def test_the_first_128_answers_and_responses_are_written_down():
    side, samples = RolloutSide(), SAMPLES[:1] * 129
    evaluated = objective().evaluate(samples, side.answer(samples, num=1), side.context())
    assert (evaluated.metrics["num_scenes"], len(evaluated.record["answers"])) == (129.0, 128)
    objective().make_segments(samples[:65], side.answer(samples[:65]), side.context())
    ((_, note),) = side.notes
    assert (len(note["returns"]), len(note["values"]), len(note["advantages"])) == (130, 128, 128)
