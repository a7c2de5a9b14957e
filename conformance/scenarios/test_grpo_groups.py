"""Capability ``grpo-server-mode``: a group of completions competes with itself."""

import pytest
import torch

from conformance.doubles.tokenizer import make_vocabulary
from conformance.scenarios.configs import config_with
from rollmatch.cli.objectives import make_objective
from rollmatch.learn.batch import MicroBatch
from rollmatch.objectives.grpo.objective import GrpoObjective
from rollmatch.objectives.protocol import ObjectiveContext
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, Sample
from rollmatch.rollout.backend import Decoding, make_requests

SECTION = "custom.extra.grpo."
GRPO = (
    "custom.trainer_variant=grpo",
    f"{SECTION}rewards=[{{function: conformance.scenarios.test_grpo_groups:score_of}}]",
    "~.decoding.temperature=1",
)
VOCABULARY = make_vocabulary()
SAMPLE = Sample(sample_id=0, origin="x:1", images=())


def score_of(answer, sample):
    """The reward that a test has written into the answer itself."""
    return float(answer)


class OfVocabulary:
    """As much of a template as an objective is made from."""

    vocabulary = VOCABULARY
    banned_ids = ()


def objective_with(*overrides: str) -> GrpoObjective:
    return make_objective(config_with(*GRPO, *overrides), OfVocabulary())


def rollout(reward, *, finish_reason="stop"):
    response = VOCABULARY.encode(str(reward))
    return Rollout(
        request_id="0.0.0",
        prompt_token_ids=(1, 2),
        response_token_ids=response,
        finish_reason=finish_reason,
        policy_version=1,
        response_logprobs=(-1.0,) * (len(response) + (finish_reason == "stop")),
    )


def segments_of(objective, *rollouts):
    context = ObjectiveContext(
        step=0,
        ranks=Ranks(),
        decoding=Decoding(max_new_tokens=8, temperature=1.0),
        generate=None,
        score=None,
        log=lambda *event, **fields: None,
    )
    (segments,) = objective.make_segments([SAMPLE], rollouts, context).segments
    return segments


def advantages(*rewards, scale):
    objective = objective_with(f"{SECTION}num_generations={len(rewards)}", f"{SECTION}scale_rewards={scale}")
    segments = segments_of(objective, *map(rollout, rewards))
    for segment in segments:
        assert set(segment.policy.advantages) == {segment.policy.advantages[0]}
    return [segment.policy.advantages[0] for segment in segments]


@pytest.mark.scenario(
    "grpo-server-mode/four-rewards-of-one-group",
    clauses=["grpo-server-mode/a-group-of-completions-competes-with-itself#3"],
)
def test_four_rewards_of_one_group():
    assert advantages(1, 0, 0, 1, scale="none") == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.scenario(
    "grpo-server-mode/four-rewards-of-one-group-scaled",
    clauses=["grpo-server-mode/a-group-of-completions-competes-with-itself#3"],
)
def test_four_rewards_of_one_group_scaled():
    assert advantages(1, 0, 0, 1, scale="group") == pytest.approx([0.8659, -0.8659, -0.8659, 0.8659], abs=1e-4)


@pytest.mark.scenario(
    "grpo-server-mode/equal-rewards-teach-nothing",
    clauses=["grpo-server-mode/a-group-of-completions-competes-with-itself#4"],
)
def test_equal_rewards_teach_nothing():
    assert advantages(1, 1, 1, 1, scale="group") == [0, 0, 0, 0]


@pytest.mark.scenario(
    "grpo-server-mode/completions-of-one-prompt-differ",
    clauses=["grpo-server-mode/a-group-of-completions-competes-with-itself#1,2"],
)
def test_completions_of_one_prompt_differ():
    objective = objective_with(f"{SECTION}num_generations=8")
    assert objective.reuse.num_rollouts == 8
    asked = [SAMPLE] * objective.reuse.num_rollouts
    requests = make_requests(asked, prompt_of=lambda sample: (1, 2), run_seed=42, step=3, rank=0)
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
