"""Capability ``grpo-server-mode``: a group of completions competes with itself."""

from dataclasses import replace

import pytest
import torch

from conformance.doubles.configs import config_with
from conformance.doubles.objectives import GRPO, SECTION, VOCABULARY, OfVocabulary
from conformance.doubles.ranks import together
from conformance.doubles.records import make_rollout
from conformance.doubles.refusals import refused
from rollmatch.learn.batch import MicroBatch
from rollmatch.objectives.protocol import ObjectiveContext
from rollmatch.ranks import Ranks
from rollmatch.records import Sample
from rollmatch.rollout.backend import Decoding, make_requests
from rollmatch.run.objectives import make_objective

SAMPLE = Sample(sample_id=0, origin="x:1", images=())


def objective_with(*overrides):
    return make_objective(config_with(*GRPO, *overrides), OfVocabulary())


def rollout(reward, *, finish_reason="stop"):
    response = VOCABULARY.encode(str(reward))
    logprobs = (-1.0,) * (len(response) + (finish_reason == "stop"))
    return make_rollout(response, prompt_token_ids=(1, 2), finish_reason=finish_reason, response_logprobs=logprobs)


def context_of(ranks=None, log=lambda *event, **fields: None):
    return ObjectiveContext(
        step=0,
        ranks=ranks or Ranks(),
        decoding=Decoding(max_new_tokens=8, temperature=1.0),
        generate=None,
        play=None,
        score=lambda segments, reference=False: [(-2.0,) * segment.train_len for segment in segments],
        teach=None,
        further=None,
        log=log,
    )


def targets_of(objective, *rollouts, samples=(SAMPLE,), **where):
    return objective.make_segments(samples, rollouts, context_of(**where))


def segments_of(*given, **where):
    return [segment for group in targets_of(*given, **where).segments for segment in group]


@pytest.mark.scenario(clauses=["grpo-server-mode/the-options-of-the-policy-gradient-enter-the-loss#5,6"])
@pytest.mark.parametrize(
    ("start", "cap", "old", "engine"),
    [("recomputed", "2.0", -2.0, -1.0), ("recomputed", "null", -2.0, None), ("server", "2.0", -1.0, None)],
)
def test_the_engine_corrects_where_the_ratio_starts_from_the_learner(start, cap, old, engine):
    rules = (f"{SECTION}old_logprobs={start}", f"{SECTION}correction_cap={cap}", f"{SECTION}num_iterations=2")
    segment = segments_of(objective_with(f"{SECTION}num_generations=2", *rules), rollout(1), rollout(0))[0]
    assert set(segment.policy.old_logprobs) == {old}
    assert set(segment.policy.sampler_logprobs or [None]) == {engine}


@pytest.mark.parametrize("logprobs", [None, (-1.0,), (-1.0,) * 3])
def test_an_engine_that_returns_other_numbers_of_log_probabilities_is_refused(logprobs):
    """One token and the stop token: two numbers."""
    objective = objective_with(f"{SECTION}num_generations=2", f"{SECTION}old_logprobs=server")
    wrong = replace(rollout(1), response_logprobs=logprobs)
    with refused("logprobs-misfit", "x:1", problem=" for 2 tokens"):
        targets_of(objective, rollout(0), wrong)
    assert [segment.policy.old_logprobs for segment in segments_of(objective, rollout(0), rollout(1))] == [
        (-1.0,) * 2
    ] * 2


@pytest.mark.scenario(
    "grpo-server-mode/four-rewards-of-one-group",
    "grpo-server-mode/four-rewards-of-one-group-scaled",
    "grpo-server-mode/equal-rewards-teach-nothing",
    clauses=["grpo-server-mode/a-group-of-completions-competes-with-itself#3,4"],
)
@pytest.mark.parametrize(
    ("rewards", "scale", "expected"),
    [
        ((1, 0, 0, 1), "none", [0.5, -0.5, -0.5, 0.5]),
        ((1, 0, 0, 1), "group", [0.8659, -0.8659, -0.8659, 0.8659]),
        ((1, 1, 1, 1), "group", [0, 0, 0, 0]),
    ],
)
def test_four_rewards_of_one_group(rewards, scale, expected):
    objective = objective_with(f"{SECTION}num_generations=4", f"{SECTION}scale_rewards={scale}")
    columns = [segment.policy.advantages for segment in segments_of(objective, *map(rollout, rewards))]
    assert all(len(set(column)) == 1 for column in columns)
    assert [column[0] for column in columns] == pytest.approx(expected, abs=1e-4)


@pytest.mark.scenario(
    "grpo-server-mode/completions-of-one-prompt-differ",
    clauses=["grpo-server-mode/a-group-of-completions-competes-with-itself#1,2"],
)
def test_completions_of_one_prompt_differ():
    objective = objective_with(f"{SECTION}num_generations=8")
    assert objective.reuse.num_rollouts == 8
    samples = [SAMPLE] * objective.reuse.num_rollouts
    requests = make_requests(samples, prompt_of=lambda sample: (1, 2), run_seed=42, step=3, rank=0)
    assert len({request.seed for request in requests}) == 8
    assert {request.prompt_token_ids for request in requests} == {(1, 2)}


@pytest.mark.scenario(
    "grpo-server-mode/a-completion-at-its-limit-is-masked",
    clauses=["grpo-server-mode/a-group-of-completions-competes-with-itself#5"],
)
def test_a_completion_at_its_limit_is_masked():
    def gradient_of(*overrides):
        objective = objective_with(f"{SECTION}num_generations=2", *overrides)
        segments = segments_of(objective, rollout(1), rollout(0, finish_reason="length"))
        starts = [0, segments[0].encoded_len]
        num_tokens = sum(segment.encoded_len for segment in segments)
        supervision = objective.supervise(segments, starts=starts, num_tokens=num_tokens)
        totals = objective.total_of([supervision], list)
        logits = torch.zeros(num_tokens, len(VOCABULARY), requires_grad=True)
        batch = MicroBatch(
            inputs={}, supervision=supervision, segments=segments, num_tokens=num_tokens, fill=1.0, is_packed=False
        )
        objective.loss(logits, batch, totals=totals).total.backward()
        moved = logits.grad.abs().sum(-1).bool().tolist()
        return any(moved[: starts[1]]), any(moved[starts[1] :])

    assert gradient_of(f"{SECTION}mask_truncated_completions=true") == (True, False)
    assert gradient_of(f"{SECTION}mask_truncated_completions=false") == (True, True)


@pytest.mark.scenario(
    "grpo-server-mode/two-processes-scale-together",
    clauses=["grpo-server-mode/the-options-of-the-policy-gradient-are-checked#2,3"],
)
def test_two_processes_scale_together():
    def advantages(rewards, *, baseline="mean", **where):
        options = ("num_generations=2", "scale_rewards=batch", f"baseline={baseline}")
        objective = objective_with(*(f"{SECTION}{option}" for option in options))
        made = segments_of(objective, *map(rollout, rewards), samples=(SAMPLE,) * (len(rewards) // 2), **where)
        return [segment.policy.advantages[0] for segment in made]

    alone = advantages((1, 0, 3, 0))
    assert alone == pytest.approx((0.3535, -0.3535, 1.0606, -1.0606), abs=1e-3)
    first, second = together(2, lambda member: advantages(((1, 0), (3, 0))[member.rank], ranks=member))
    assert first + second == pytest.approx(alone)
    assert advantages((1, 0, 3, 0), baseline="leave_one_out") == pytest.approx([2 * one for one in alone])


def test_the_first_failures_of_rewards_are_written_down():
    notes = []
    objective = objective_with(f"{SECTION}num_generations=2")
    made = map(rollout, ("a", "b", "c", 1, "d", "e", 0, "f"))
    targets_of(objective, *made, samples=(SAMPLE,) * 4, log=lambda event, **fields: notes.append(fields))
    assert [failure[-3:] for failure in notes[0]["failures"]] == ["'a'", "'b'", "'c'", "'d'", "'e'"]
    assert notes[0]["rewards"] == [None, None, None, 1, None, None, 0, None]


def test_figures_count_groups_that_teach_nothing_and_an_evaluation_shows_its_first_answers():
    objective = objective_with(f"{SECTION}num_generations=2")
    made = targets_of(objective, *map(rollout, (1, 0, 1, 1)), samples=(SAMPLE,) * 2)
    figures = objective.summarize(made.reports)
    assert (figures["reward"], figures["flat_group_rate"]) == (0.75, 0.5)
    evaluated = objective.evaluate([SAMPLE] * 65, [rollout(1)] * 65, context_of())
    assert [shown["reward"] for shown in evaluated.record["answers"]] == [1.0] * 64
    assert evaluated.metrics["num_scenes"] == 65
    assert "flat_group_rate" not in evaluated.metrics
