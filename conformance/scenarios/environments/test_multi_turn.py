"""Episodes of several turns: who wrote what, what is requested next, what values are, and what is learnt."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.doubles.ladders import (
    MAX_TURNS,
    SAMPLES,
    STOP,
    TOP,
    Ladder,
    TurnSide,
    climbing,
    grouped,
    played,
    reply,
    reports_of,
    searching,
    targets_of,
    value_of,
    values_in,
    world,
)
from conformance.doubles.locks import A, B, gradient_of, prompt_of, segments_of
from conformance.doubles.ranks import together
from rollmatch.objectives.grpo.loss import supervise_policy
from rollmatch.objectives.vineppo.search import SearchBudget, TreeValues
from rollmatch.objectives.vineppo.split import FixedTokens, Turns
from rollmatch.objectives.vineppo.tree import SearchRules
from rollmatch.rollout.backend import Decoding

LONG = Decoding(max_new_tokens=2, temperature=1.0)


@pytest.mark.scenario(
    clauses=[
        "environments/only-what-the-policy-wrote-is-learnt#1",
        "environments/an-episode-ends-by-its-environment-or-by-a-limit#1,2",
    ]
)
@pytest.mark.parametrize("decoding", [Decoding(max_new_tokens=1), LONG])
def test_turns_and_observations_follow_each_other_as_they_were_written(decoding):
    side = TurnSide(decoding=decoding)
    for one in played(side):
        made, ids, rung = one.trajectory, [], 0
        paid = dict(made.rewards)
        for place, turn in enumerate(made.turns):
            is_last = place == len(made.turns) - 1
            letter = made.token_ids[turn.start]
            rung += paid[turn.stop] > 0
            ids += [letter, *([STOP] if decoding is LONG else [])]
            ids += [] if is_last else reply(f"<{rung}>", decoding is LONG)
            assert turn.number == place
            assert (made.turns[place + 1].start if not is_last else len(made.token_ids)) == len(ids)
        assert made.token_ids == tuple(ids)
        assert made.is_finished == (rung == TOP)
        assert len(made.turns) <= MAX_TURNS
        assert one.finish_reason == ("stop" if decoding is LONG else "length")
        assert one.response_token_ids == tuple(ids[:-1] if decoding is LONG else ids)
        assert one.num_tokens == len(made.turns)


def test_turns_that_are_missing_end_the_run():
    class Short(TurnSide):
        def generate(self, requests, decoding):
            return super().generate(requests, decoding)[:-1]

    side = TurnSide()
    with pytest.raises(ValueError, match="zip"):
        grouped().make_segments(SAMPLES, side.answer(SAMPLES, num=1)[:-1], side.context())
    with pytest.raises(ValueError, match="zip"):
        Short().answer(SAMPLES)


def test_live_episodes_are_requested_in_one_wave_per_turn():
    side = TurnSide()
    turns = [len(one.trajectory.turns) for one in played(side, num=8)]
    waves = [len(requests) for requests, _ in side.calls]
    assert waves == [sum(n > t + 1 for n in turns) for t in range(max(turns) - 1)]
    requests = [request for call, _ in side.calls for request in call]
    assert len({request.request_id for request in requests}) == len(requests)
    assert len({request.seed for request in requests}) > 0.95 * len(requests)
    assert {request.prompt_token_ids for request in requests} == {prompt_of(sample) for sample in SAMPLES}


@pytest.mark.scenario(clauses=["environments/episodes-can-be-played-again#2"])
def test_the_same_seed_plays_the_same_and_attempts_differ():
    def episodes(made=None, **fields):
        return [one.trajectory for one in played(TurnSide(**fields), made, num=8)]

    assert episodes() == episodes()
    assert len({one.token_ids for one in episodes()}) > 8
    rewards = [[one.rewards for one in episodes(made, letters=(A,))] for made in (None, world(run_seed=2))]
    assert rewards[0] != rewards[1]
    assert len(set(rewards[0])) > 1, "the same letters, and other slips"


@pytest.mark.scenario(clauses=["environments/only-what-the-policy-wrote-is-learnt#3"])
@given(num_turns=st.integers(1, 6), turn_len=st.integers(1, 3), most=st.integers(3, 60), seed=st.integers(1, 999))
@settings(max_examples=40, deadline=None)
def test_prefixes_are_true_prefixes_and_limits_hold(num_turns, turn_len, most, seed):
    side = TurnSide(decoding=Decoding(max_new_tokens=turn_len, temperature=1.0))
    in_world = world(max_turns=num_turns, max_response_tokens=most, run_seed=seed)
    made = climbing(in_world=in_world, splitter=FixedTokens(num_tokens=2), num_continuations=1)
    trajectories = [one.trajectory for one in played(side, in_world)]
    side.calls.clear()
    targets = targets_of(side, made)
    for segment in segments_of(targets):
        target, mask = segment.token_ids[segment.prompt_len :], segment.policy.is_written
        assert len(target) == len(mask) <= most
        assert mask[0]
        assert mask[-1]
        assert {target[i] for i in range(len(target)) if mask[i]} <= {A, B, STOP}
        assert all(advantage == 0 for advantage, mine in zip(segment.policy.advantages, mask, strict=True) if not mine)
    wholes = {segment.token_ids for segment in segments_of(targets)}
    continued = next(requests for requests, _ in side.calls if ".c" in requests[0].request_id)
    assert len(continued) == targets.reports[-1].num_continuations
    for request in continued:
        assert any(whole[: len(request.token_ids)] == request.token_ids for whole in wholes)
    for one in trajectories:
        assert len(one.turns) <= num_turns
        assert one.written == tuple(map(one.is_written, range(len(one.token_ids))))
        cuts = (*(turn.start for turn in one.turns), len(one.token_ids))
        assert Turns().cuts(one) == cuts
        assert turn_len > 1 or FixedTokens(num_tokens=1).cuts(one) == cuts, "no step starts in an observation"


@pytest.mark.parametrize("decoding", [Decoding(max_new_tokens=1), LONG])
def test_rollout_tokens_are_those_of_all_turns(decoding):
    side = TurnSide(decoding=decoding)
    for made in (climbing(num_continuations=1), grouped()):
        targets = targets_of(side, made)
        written = [segment.token_ids[segment.prompt_len :] for segment in segments_of(targets)]
        assert targets.num_rollout_tokens == sum(ids.count(A) + ids.count(B) for ids in written)


@pytest.mark.scenario(clauses=["environments/continuations-go-on-from-a-clone#3"])
def test_a_continuation_has_the_turns_that_are_left():
    side = TurnSide(letters=(B,))
    targets_of(side, climbing(num_continuations=2))
    waves = [requests for requests, _ in side.calls[MAX_TURNS - 1 :]]
    assert [len(wave) // (2 * len(SAMPLES)) for wave in waves] == [5, 4, 3, 2, 1]
    assert {len(request.prefix_token_ids) for request in waves[-1]} == {4 * len((B, *reply("<0>", False)))}
    cost = targets_of(side, climbing(num_continuations=3)).reports[-1]
    assert cost.num_states == 4 * MAX_TURNS
    assert cost.num_continuations == 3 * len(SAMPLES) * MAX_TURNS, "equal states are valued once"


@pytest.mark.scenario(clauses=["environments/episodes-can-be-played-again#2"])
def test_values_are_those_of_dynamic_programming():
    side = TurnSide()
    targets = targets_of(side, climbing(num_continuations=400))
    reports = reports_of(targets)
    assert reports
    for segment, report in zip(segments_of(targets), reports, strict=True):
        assert report.values == pytest.approx(values_in(segment), abs=0.1)


@pytest.mark.scenario(
    "environments/a-world-without-chance", clauses=["environments/continuations-go-on-from-a-clone#1,2"]
)
def test_a_world_without_chance_goes_on_from_where_it_was():
    side = TurnSide(letters=(A,))
    targets = targets_of(side, climbing(in_world=world(lambda: Ladder(slip=0.0)), num_continuations=2))
    for report in reports_of(targets):
        assert report.values == pytest.approx((1.75, 1.5, 1.25))
        assert report.step_advantages == pytest.approx((0.0, 0.0, 0.0))
        assert report.num_turns == TOP


def test_advantages_with_step_rewards_telescope_and_a_tree_counts_what_was_paid():
    valuer = TreeValues(SearchRules(), SearchBudget(num_rounds=6, num_per_round=16, num_least=3), Turns())
    for made in (climbing(), searching(), replace(climbing(), valuer=valuer)):
        for report in reports_of(targets_of(TurnSide(), made)):
            assert sum(report.step_advantages) == pytest.approx(report.total_return - report.values[0])
    for tree in valuer.trees.values():
        assert 0.0 <= tree.root.total / tree.root.visits <= 1.75
        assert tree.root.total / tree.root.visits == pytest.approx(value_of(0, MAX_TURNS), abs=0.45)


@pytest.mark.scenario(
    "environments/observations-between-turns-of-one-letter",
    clauses=["environments/only-what-the-policy-wrote-is-learnt#2"],
)
def test_observations_get_no_gradient_and_turns_do():
    side = TurnSide()
    segments = segments_of(targets_of(side, climbing(num_continuations=4)))
    gradient, supervision, totals = gradient_of(segments)
    starts = accumulate((segment.encoded_len for segment in segments), initial=0)
    written = [
        start + segment.prompt_len + place
        for start, segment in zip(starts, segments, strict=False)
        for place, token_id in enumerate(segment.token_ids[segment.prompt_len :])
        if token_id in (A, B)
    ]
    assert supervision.positions == tuple(written)
    assert totals.num_tokens == totals.num_target_tokens == len(written)
    touched = gradient.abs().sum(-1).nonzero().flatten().tolist()
    assert touched
    assert set(touched) <= {place - 1 for place in written}


def test_two_ranks_value_what_one_would():
    sides = [TurnSide(), TurnSide()]
    halves = together(2, lambda member: targets_of(sides[member.rank], ranks=member))
    whole = targets_of(TurnSide())
    assert [h.segments for h in halves] == [whole.segments] * 2
    assert len(sides[0].calls) == len(sides[1].calls)


def test_an_evaluation_is_shared_among_ranks():
    def look(member):
        side = TurnSide()
        return climbing().evaluate(SAMPLES, side.answer(SAMPLES, num=1), side.context(member))

    side = TurnSide()
    whole = climbing().evaluate(SAMPLES, side.answer(SAMPLES, num=1), side.context())
    assert together(2, look) == [whole] * 2
    assert whole.metrics["num_scenes"] == 2
    assert "<" in whole.record["answers"][0]["response_text"]


@pytest.mark.parametrize("old", ["server", "recomputed"])
def test_grpo_learns_from_the_same_episodes(old):
    side = TurnSide(has_logprobs=True)
    made = grouped(old=old)
    targets = made.make_segments(SAMPLES, side.answer(SAMPLES), side.context())
    episodes = [one.trajectory for one in played(TurnSide(has_logprobs=True))]
    for segment, episode in zip(segments_of(targets), episodes, strict=True):
        assert segment.token_ids[segment.prompt_len :] == episode.token_ids
        assert segment.policy.is_written == episode.written
        assert len(set(segment.policy.advantages)) == 1
    first, second = (one.policy.advantages[0] for one in targets.segments[0])
    assert first - second == pytest.approx(episodes[0].total_return - episodes[1].total_return)
    figures = made.summarize(targets.reports)
    assert figures["reward"] == pytest.approx(sum(one.total_return for one in episodes) / 4)
    assert figures["truncated_rate"] == pytest.approx(sum(not one.is_finished for one in episodes) / 4)
    if old == "server":
        supervision = supervise_policy(segments_of(targets)[:1], starts=[0], num_tokens=200)
        assert set(supervision.old_logprobs) == {-0.7}
