"""The clipped loss: by hand on small numbers, and the same however a step is cut up."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from conformance.doubles.loss_cases import supervision_of
from conformance.doubles.records import segment_with
from conformance.doubles.refusals import refused
from rollmatch.objectives.grpo.loss import (
    Correction,
    PolicyRules,
    PolicyTotals,
    count_policy_totals,
    policy_logit_indices,
    policy_loss,
    score_tokens,
)
from rollmatch.records import PolicyTarget

NUM_IDS = 11


def segment(length, *, prompt_len=1, is_masked=False, **columns):
    columns = {name: tuple(values) for name, values in columns.items()}
    columns.setdefault("advantages", (1.0,) * length)
    ids = tuple(place % NUM_IDS for place in range(prompt_len + length))
    policy = PolicyTarget(is_masked=is_masked, **columns)
    return segment_with(ids, prompt_len=prompt_len, prefix_len=length, policy=policy)


def rules_with(**rules):
    return PolicyRules(**{"max_new_tokens": 10, "temperature": 1.0} | rules)


def score(logprobs, *segments, totals=None, **rules):
    supervision = supervision_of(*segments)
    totals = totals or count_policy_totals([supervision], list)
    column = torch.tensor(logprobs, requires_grad=True)
    terms = score_tokens(column, supervision=supervision, rules=rules_with(**rules), totals=totals)
    terms.total.backward()
    return float(terms.total.detach()), column.grad.tolist(), terms.figures


@pytest.mark.scenario(clauses=["grpo-server-mode/the-options-of-the-policy-gradient-are-checked#10"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [
        (1.1, 1.0, -1.1, True),
        (1.5, 1.0, -1.2, False),
        (0.5, 1.0, -0.5, True),
        (0.5, -1.0, 0.8, False),
        (1.5, -1.0, 1.5, True),
    ],
)
def test_the_ratio_is_clipped_where_it_has_gone_far_enough(ratio, advantage, loss, moves):
    total, grad, figures = score(
        [math.log(ratio) - 1.0], segment(1, advantages=[advantage], old_logprobs=[-1.0]), epsilon=0.2
    )
    assert total == pytest.approx(loss, rel=1e-6)
    assert (grad[0] != 0) == moves
    assert figures["clip_share"] == (0 if moves else 1)


@pytest.mark.scenario(clauses=["grpo-server-mode/the-options-of-the-policy-gradient-are-checked#10"])
@pytest.mark.parametrize(("ratio", "moves"), [(1.27, True), (1.29, False)])
def test_the_upper_clip_is_the_higher_one_where_it_is_set(ratio, moves):
    far = segment(1, advantages=[1.0], old_logprobs=[-1.0])
    _, grad, _ = score([math.log(ratio) - 1.0], far, epsilon=0.2, epsilon_high=0.28)
    assert (grad[0] != 0) == moves


@pytest.mark.scenario(clauses=["grpo-server-mode/the-options-of-the-policy-gradient-enter-the-loss#4"])
def test_both_sides_of_the_clip_are_their_own_and_a_cap_bounds_what_a_bad_completion_costs():
    far = segment(1, advantages=[1.0], old_logprobs=[-1.0])
    assert score([math.log(1.3) - 1.0], far, epsilon=0.2, epsilon_high=0.28)[0] == pytest.approx(-1.28)
    bad = segment(1, advantages=[-1.0], old_logprobs=[-3.0])
    assert score([0.0], bad)[0] == pytest.approx(math.exp(3.0))
    assert score([0.0], bad, ratio_cap=4.0)[0] == pytest.approx(4.0)


@pytest.mark.scenario(clauses=["grpo-server-mode/the-options-of-the-policy-gradient-enter-the-loss#3"])
def test_the_distance_to_the_reference_is_k3():
    away = segment(1, advantages=[0.0], reference_logprobs=[-2.0])
    k3 = math.exp(-1.0) - (-1.0) - 1
    total, grad, figures = score([-1.0], away, beta=0.5)
    assert total == pytest.approx(0.5 * k3)
    assert grad[0] == pytest.approx(0.5 * (1 - math.exp(-1.0)))
    assert figures["kl"] == pytest.approx(k3)
    assert score([-1.0], away)[0] == 0


@pytest.mark.scenario(clauses=["grpo-server-mode/the-options-of-the-policy-gradient-enter-the-loss#6"])
def test_the_engines_own_rounding_is_corrected_up_to_a_cap():
    drifted = segment(2, old_logprobs=[-1.0, -1.0], sampler_logprobs=[-1.1, -3.0])
    total, _, figures = score([-1.0, -1.0], drifted, correction=Correction(high=2.0))
    assert total == pytest.approx(-(math.exp(0.1) + 2.0) / 2)
    assert figures["drift"] == pytest.approx((0.1 + 2.0) / 2)
    assert figures["correction_mean"] == pytest.approx((math.exp(0.1) + 2.0) / 2)
    assert score([-1.0, -1.0], drifted, correction=None)[0] == pytest.approx(-1.0)


PAIR = (
    segment(2, old_logprobs=[-1.0, -1.0], sampler_logprobs=[-2.0, -1.5]),
    segment(1, old_logprobs=[-1.0], sampler_logprobs=[-1.0]),
)
"""A response whose tokens the engine thought exp(-1) and exp(-0.5) times as likely; one without a difference."""


@pytest.mark.scenario(clauses=["grpo-server-mode/the-ratio-and-the-correction-are-of-tokens-or-of-responses#4"])
@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (Correction(high=2.0), (2.0, math.exp(0.5), 1.0)),
        (Correction(high=9.0, low=1.5), (math.exp(1.0), math.exp(0.5), 1.5)),
        (Correction(high=2.0, mode="mask"), (0.0, math.exp(0.5), 1.0)),
        (Correction(high=2.0, low=1.5, mode="mask"), (0.0, math.exp(0.5), 0.0)),
        (Correction(level="sequence", high=9.0), (math.exp(1.5), math.exp(1.5), 1.0)),
        (Correction(level="sequence", high=4.0), (4.0, 4.0, 1.0)),
        (Correction(level="sequence", high=4.0, mode="mask"), (0.0, 0.0, 1.0)),
        (Correction(level="geometric", high=2.0, mode="mask"), (0.0, 0.0, 1.0)),
        (Correction(level="geometric", high=2.2, mode="mask"), (1.0, 1.0, 1.0)),
    ],
)
def test_the_weight_is_of_the_token_or_of_its_response(correction, weights):
    _, grad, figures = score([-1.0] * 3, *PAIR, correction=correction)
    assert grad == pytest.approx([-weight / 3 for weight in weights])
    assert figures["correction_mean"] == pytest.approx(sum(weights) / 3)


@pytest.mark.scenario(
    "grpo-server-mode/the-ratio-of-a-response",
    clauses=["grpo-server-mode/the-ratio-and-the-correction-are-of-tokens-or-of-responses#2"],
)
def test_the_ratio_of_a_response_is_the_geometric_mean_of_its_tokens():
    far = segment(2, old_logprobs=[-1.0 - math.log(2), -1.0])
    near = segment(1, old_logprobs=[-1.0])
    total, grad, figures = score([-1.0] * 3, far, near, importance="sequence", epsilon=0.5)
    mean = math.sqrt(2)
    assert total == pytest.approx(-(2 * mean + 1) / 3)
    assert grad == pytest.approx([-mean / 3, -mean / 3, -1 / 3])
    assert figures["ratio_mean"] == pytest.approx((2 * mean + 1) / 3)
    assert score([-1.0] * 3, far, near, importance="sequence", epsilon=0.4)[1] == pytest.approx([0, 0, -1 / 3])


@pytest.mark.scenario(
    "grpo-server-mode/a-weight-is-bounded-and-the-token-still-learns",
    clauses=["grpo-server-mode/the-ratio-and-the-correction-are-of-tokens-or-of-responses#7"],
)
@pytest.mark.parametrize(("ratio", "weight"), [(2.0, 1.5), (0.1, 0.1)])
def test_a_clipped_weight_leaves_the_token_its_gradient(ratio, weight):
    for advantage in (1.0, -1.0):
        far = segment(1, advantages=[advantage], old_logprobs=[-1.0 - math.log(ratio)])
        total, grad, figures = score([-1.0], far, clip="cispo", epsilon_high=0.5)
        assert (total, grad[0]) == (pytest.approx(weight * advantage), pytest.approx(-weight * advantage))
        assert figures["clip_share"] == (ratio > weight)


@pytest.mark.scenario(
    "grpo-server-mode/tokens-of-a-long-and-of-a-short-completion",
    clauses=["grpo-server-mode/the-options-of-the-policy-gradient-enter-the-loss#1"],
)
@pytest.mark.parametrize(
    ("normalize", "weights"), [("token", [1 / 4] * 4), ("sequence", [1 / 6] * 3 + [1 / 2]), ("constant", [1 / 20] * 4)]
)
def test_tokens_weigh_as_the_normalisation_says(normalize, weights):
    _, grad, _ = score([-1.0] * 4, segment(3), segment(1), normalize=normalize)
    assert grad == pytest.approx([-weight for weight in weights])


@pytest.mark.scenario(clauses=["grpo-server-mode/the-options-of-the-policy-gradient-enter-the-loss#2"])
@pytest.mark.parametrize(("normalize", "weight"), [("token", 1 / 5), ("sequence", 1 / 4), ("constant", 1 / 20)])
def test_a_masked_completion_has_no_token_but_counts_as_one(normalize, weight):
    _, grad, _ = score([-1.0] * 2, segment(2), segment(3, is_masked=True), normalize=normalize)
    assert grad == pytest.approx([-weight] * 2)
    supervision = supervision_of(segment(2), segment(3, is_masked=True))
    assert policy_logit_indices(supervision) == (0, 1)
    totals = count_policy_totals([supervision], list)
    assert totals == PolicyTotals(num_tokens=2, num_target_tokens=5, num_segments=2)
    logits = torch.zeros(7, NUM_IDS, requires_grad=True)
    rules = rules_with(normalize=normalize)
    policy_loss(logits, supervision=supervision, rules=rules, totals=totals, is_kept=False).total.backward()
    assert logits.grad.abs().sum(-1).bool().tolist() == [True, True, False, False, False, False, False]


def random_segment(length, prompt_len, seed, is_masked):
    generator = torch.Generator().manual_seed(seed)
    names = ("advantages", "old_logprobs", "sampler_logprobs", "reference_logprobs")
    columns = {name: (torch.randn(length, generator=generator) - 2 * (name != names[0])).tolist() for name in names}
    return segment(length, prompt_len=prompt_len, is_masked=is_masked, **columns)


segments = st.builds(random_segment, st.integers(1, 5), st.integers(1, 3), st.integers(0, 99), st.booleans())


def test_a_target_that_does_not_fit_its_tokens_is_refused():
    misfits = segment(2, advantages=[1.0]), segment(2, old_logprobs=[-1.0])
    for wrong in (*misfits, segment(2, prompt_len=0), replace(segment(2), policy=None)):
        with refused("policy-target-misfit", "x:1"):
            supervision_of(wrong)
    assert supervision_of(segment(2, old_logprobs=[-1.0, -1.0])).positions == (1, 2)


def test_logits_of_another_number_are_refused():
    supervision = supervision_of(segment(2))
    totals = count_policy_totals([supervision], list)
    scoring = {"supervision": supervision, "rules": rules_with(), "totals": totals}
    for num_rows, is_kept in ((3, True), (2, False)):
        with refused("policy-logits-misfit", "logits"):
            policy_loss(torch.zeros(num_rows, NUM_IDS), is_kept=is_kept, **scoring)
        policy_loss(torch.zeros(5 - num_rows, NUM_IDS), is_kept=is_kept, **scoring)
