"""The masked loss: its value by hand, and what it refuses."""

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from conformance.doubles.loss_cases import (
    FIELDS,
    RULES,
    masked_loss_from_hidden,
    random_logits,
    scored_segment,
)
from conformance.doubles.refusals import refused
from conformance.doubles.tiny_qwen3_vl import COORD_IDS, VOCAB_LEN
from rollmatch.objectives.rollout_matching.loss import (
    LossTotals,
    logit_indices,
    masked_loss,
    masked_loss_of_kept,
    slot_losses,
)
from rollmatch.objectives.rollout_matching.supervision import IGNORED
from rollmatch.records import Supervision


def by_hand(logits, supervision, rules):
    """Sums of text CE and slot losses in float64, one position at a time."""
    logits = logits.double()
    ce = slots = 0.0
    for position, (label, weight) in enumerate(zip(supervision.labels, supervision.weights, strict=True)):
        if label != IGNORED:
            ce += weight * -torch.log(logits[position - 1].softmax(-1)[label]).item()
    for position, true_bin in zip(supervision.coord_positions, supervision.coord_bins, strict=True):
        scaled = logits[position - 1] / rules.temperature_coord
        p = scaled[list(rules.coord_ids)].softmax(-1)
        q = [
            0.0
            if rules.target_truncate is not None and abs(k - true_bin) > rules.target_truncate
            else math.exp(-((k - true_bin) ** 2) / (2 * rules.target_sigma**2))
            for k in range(1000)
        ]
        q = torch.tensor(q, dtype=torch.float64) / sum(q)
        soft_ce = -(q * p.log()).sum().item()
        below = zip(accumulate(p.tolist()), accumulate(q.tolist()), strict=True)
        w1 = sum(abs(mine - true) for mine, true in below) / 1000
        gate = -math.log(scaled.softmax(-1)[list(rules.coord_ids)].sum().item())
        slots += rules.soft_ce_weight * soft_ce + rules.w1_weight * w1 + rules.gate_weight * gate
    return ce, slots


@pytest.mark.scenario(clauses=["supervision/coordinates-are-learnt-as-distributions-over-bins#1"])
@pytest.mark.parametrize(
    "rules",
    [
        RULES,
        replace(RULES, gate_weight=0.0),
        replace(RULES, target_sigma=5.0, target_truncate=16, temperature_coord=1.7),
        replace(RULES, soft_ce_weight=0.0, w1_weight=2.0, gate_weight=0.0),
    ],
)
def test_the_loss_is_what_the_formula_says(rules):
    logits, scoring = scored_segment(3, num_slots=6)
    totals = LossTotals(text_weight=40.0, num_slots=30)
    terms = masked_loss(logits, **scoring | {"rules": rules, "totals": totals})
    ce, slots = by_hand(logits, scoring["supervision"], rules)
    expected = {
        "total": ce / 40 + slots / 30,
        "ce": ce / 40,
        "coord": slots / 30,
    }
    assert {field: getattr(terms, field).item() for field in FIELDS} == pytest.approx(expected, rel=1e-5)


@pytest.mark.scenario(
    "supervision/the-prediction-is-ten-bins-off",
    clauses=["supervision/coordinates-are-learnt-as-distributions-over-bins#4"],
)
def test_a_slot_is_cheapest_on_its_true_bin_and_dearer_with_distance():
    rules = replace(RULES, soft_ce_weight=0.0, gate_weight=0.0)
    logits = torch.full((3, VOCAB_LEN), -20.0)
    for row, guess in enumerate((500, 520, 700)):
        logits[row, COORD_IDS[guess]] = 20.0
    slots = slot_losses(logits, bins=torch.tensor([500] * 3), rules=rules)
    assert slots[1].item() == pytest.approx(20 / 1000, rel=0.01)
    assert slots[2].item() == pytest.approx(200 / 1000, rel=0.01)
    assert slots[0] < slots[1] < slots[2]


@pytest.mark.scenario(
    "supervision/half-of-the-probability-leaves-the-coordinates",
    clauses=["supervision/coordinates-are-learnt-as-distributions-over-bins#5"],
)
def test_the_gate_measures_mass_outside_the_coordinates():
    logits = torch.zeros(1, VOCAB_LEN)
    rules = replace(RULES, soft_ce_weight=0.0, w1_weight=0.0, gate_weight=1.0)
    gate = slot_losses(logits, bins=torch.tensor([5]), rules=rules)
    assert gate.item() == pytest.approx(math.log(VOCAB_LEN / 1000), rel=1e-5)


NOTHING = Supervision(labels=(IGNORED,) * 5, weights=(0.0,) * 5, coord_positions=(), coord_bins=())


@pytest.mark.scenario(
    "supervision/nothing-to-learn", clauses=["supervision/the-loss-does-not-depend-on-how-a-step-is-cut-up#3"]
)
@pytest.mark.parametrize("totals", [LossTotals(text_weight=0.0, num_slots=0), LossTotals(text_weight=9.0, num_slots=9)])
def test_nothing_supervised_is_a_zero_loss_with_a_graph(totals):
    head = torch.nn.Linear(16, VOCAB_LEN)
    hidden = torch.randn(5, 16, requires_grad=True)
    scoring = {"supervision": NOTHING, "rules": RULES, "totals": totals}
    for terms in (
        masked_loss(head(hidden), **scoring),
        masked_loss_of_kept(head(hidden[:0]), **scoring),
        masked_loss_from_hidden(hidden, lm_head=head, **scoring),
    ):
        assert all(getattr(terms, field).item() == 0 for field in FIELDS)
        hidden.grad, head.weight.grad = None, None
        terms.total.backward()
        assert hidden.grad is not None
        assert not hidden.grad.any()
        assert head.weight.grad is not None
        assert not head.weight.grad.any()


@pytest.mark.parametrize(
    "score",
    [
        lambda logits, scoring: masked_loss(logits[1:], **scoring),
        lambda logits, scoring: masked_loss_of_kept(logits, **scoring),
        lambda logits, scoring: masked_loss_from_hidden(logits[1:], lm_head=lambda x: x, **scoring),
    ],
)
def test_logits_that_do_not_fit_the_supervision_are_refused(score):
    logits, scoring = scored_segment()
    kept = list(logit_indices(scoring["supervision"]))
    with refused("logits-misfit", "logits"):
        score(logits, scoring)
    masked_loss(logits, **scoring)
    masked_loss_of_kept(logits[kept], **scoring)
    masked_loss_from_hidden(logits, lm_head=lambda x: x, **scoring)


@pytest.mark.parametrize(
    "first", [{"labels": (5, IGNORED), "weights": (1.0, 0.0)}, {"coord_positions": (0,), "coord_bins": (3,)}]
)
def test_a_supervised_first_token_is_refused(first):
    base = {"labels": (IGNORED, 5), "weights": (0.0, 1.0), "coord_positions": (), "coord_bins": ()}

    def score(columns):
        totals = LossTotals(text_weight=2.0, num_slots=2)
        return masked_loss(random_logits(2), supervision=Supervision(**columns), rules=RULES, totals=totals)

    with refused("logits-misfit", "0"):
        score(base | first)
    assert score(base).ce > 0


@pytest.mark.parametrize("short", [{"text_weight": 1.0}, {"num_slots": 7}])
def test_totals_of_less_than_one_row_are_refused(short):
    logits, scoring = scored_segment()
    with refused("totals-too-small", "totals"):
        masked_loss(logits, **scoring | {"totals": replace(scoring["totals"], **short)})
    masked_loss(logits, **scoring)
