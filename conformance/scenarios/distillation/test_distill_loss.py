"""The losses of distillation are TRL's, on a recorded batch (``fixtures/trl/record_distill.py``)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance.doubles.loss_cases import supervision_of
from conformance.doubles.records import segment_with
from rollmatch.learn.head import HeadStates, logprobs_with_top
from rollmatch.objectives.distill.loss import Divergence, distill_loss
from rollmatch.objectives.grpo.loss import PolicyRules, count_policy_totals, policy_loss
from rollmatch.records import PolicyTarget

RECORDED = json.loads((Path(__file__).parents[3] / "fixtures/trl/distill.json").read_text())
TOLERANCE = 1e-6
PROMPT = (2, 5)


def name_of(case):
    return " ".join(f"{name}={case[name]}" for name in ("loss", "beta", "temperature", "top_k"))


def segments_of(case, *, weight=1.0):
    """Completions with what a teacher says of them."""
    ids, teacher = torch.tensor(RECORDED["ids"]), torch.tensor(RECORDED["teacher"], dtype=torch.float64)
    top_k = case["top_k"] or 0
    rows = logprobs_with_top(teacher, ids, top_k=top_k, temperature=case["temperature"]).tolist()
    first = 0
    for length in RECORDED["lengths"]:
        mine, taught = RECORDED["ids"][first : first + length], rows[first : first + length]
        first += length
        policy = PolicyTarget(
            advantages=(0.0,) * length,
            teacher_logprobs=tuple(row[0] for row in taught),
            teacher_top=tuple(tuple(zip(map(int, row[1 : 1 + top_k]), row[1 + top_k :])) for row in taught),
            teacher_weight=weight,
        )
        yield segment_with((*PROMPT, *mine), prompt_len=len(PROMPT), prefix_len=length, policy=policy)


def rules_of(case):
    return PolicyRules(correction=None, max_new_tokens=8, temperature=case["temperature"])


def terms_of(case, logits, segments):
    supervision, rules = supervision_of(*segments), rules_of(case)
    divergence = None if case["beta"] is None else Divergence(beta=case["beta"], top_k=case["top_k"])
    totals = count_policy_totals([supervision], list)
    return distill_loss(
        logits, supervision=supervision, rules=rules, divergence=divergence, totals=totals, is_kept=True
    )


@pytest.mark.scenario(clauses=["distillation/the-losses-of-distillation-are-the-published-ones#5"])
@pytest.mark.parametrize(("weight", "dtype"), [(1.0, torch.float32), (0.3, torch.float32), (1.0, torch.float64)])
@pytest.mark.parametrize("case", RECORDED["cases"], ids=name_of)
def test_loss_and_gradient_are_those_of_trl(case, weight, dtype):
    """TRL's are recorded in float64."""
    logits = torch.tensor(RECORDED["policy"], dtype=dtype, requires_grad=True)
    terms = terms_of(case, logits, [*segments_of(case, weight=weight)])
    terms.total.backward()
    expected = weight * torch.tensor(case["gradient"], dtype=dtype)
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=TOLERANCE)
    if case["beta"] is not None:  # of the sampled token, TRL's value is another one with the same gradient
        assert terms.total.item() == pytest.approx(weight * case["value"], abs=TOLERANCE)
        assert terms.figures["divergence"] == pytest.approx(case["value"], abs=TOLERANCE)


@pytest.mark.scenario(clauses=["distillation/the-losses-of-distillation-are-the-published-ones#6"])
@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_what_a_sure_policy_leaves_to_other_tokens_is_no_rounding(beta):
    """In float64, 1 minus the top is exact enough; the other two tokens have 5e-7 between them."""
    logits, ids, teacher = torch.tensor([[16.0, 15.0, 0.5, 0.7]]), torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.2]])
    top = logits.double().softmax(-1)[0, :2]
    p, q = torch.cat([top, 1 - top.sum()[None]]), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    assert 1e-7 < float(p[2]) < 1e-6
    mixture = (1 - beta) * p + beta * q
    pairs = {0: [(1, q, p)], 1: [(1, p, q)]}.get(beta, [(beta, q, mixture), (1 - beta, p, mixture)])
    wanted = sum(share * (one * (one / other).log()).sum() for share, one, other in pairs)
    found = Divergence(beta=beta, top_k=2).of(logits.log_softmax(-1), ids, teacher.log())
    torch.testing.assert_close(found.double()[0], wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", RECORDED["cases"][::7], ids=name_of)
def test_a_head_that_makes_no_logits_gives_the_same(case):
    hidden = torch.tensor(RECORDED["policy"], requires_grad=True)
    head = torch.nn.Linear(hidden.shape[1], hidden.shape[1], bias=False)
    torch.nn.init.eye_(head.weight)
    terms_of(case, HeadStates.of(hidden, head), [*segments_of(case)]).total.backward()
    torch.testing.assert_close(hidden.grad, torch.tensor(case["gradient"]), rtol=0, atol=TOLERANCE)


@pytest.mark.scenario(clauses=["distillation/the-losses-of-distillation-are-the-published-ones#4"])
@pytest.mark.parametrize("case", RECORDED["cases"][::7], ids=name_of)
def test_rewards_and_teachers_add_up(case):
    """In one gradient; each is that of the loss alone."""
    taught = [*segments_of(case)]
    advantages = [(0.5 - place,) * segment.train_len for place, segment in enumerate(taught)]
    both = [
        replace(segment, policy=replace(segment.policy, advantages=its))
        for segment, its in zip(taught, advantages, strict=True)
    ]
    paid = [replace(segment, policy=PolicyTarget(advantages=segment.policy.advantages)) for segment in both]
    logits = torch.tensor(RECORDED["policy"], requires_grad=True)
    terms_of(case, logits, both).total.backward()
    supervision, rules = supervision_of(*paid), rules_of(case)
    totals = count_policy_totals([supervision], list)
    alone = torch.tensor(RECORDED["policy"], requires_grad=True)
    policy_loss(alone, supervision=supervision, rules=rules, totals=totals, is_kept=True).total.backward()
    expected = alone.grad + torch.tensor(case["gradient"])
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=TOLERANCE)
    assert alone.grad.abs().max() > 0.01


def test_the_recorded_cases_differ():
    """Else a key that has no effect would pass for one that is right."""
    values = {(case["loss"], round(case["value"], 6)) for case in RECORDED["cases"]}
    assert len(values) == len(RECORDED["cases"])
