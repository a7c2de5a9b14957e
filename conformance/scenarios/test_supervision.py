"""Capability ``supervision``, scenario by scenario."""

import pytest
import torch

from conformance.doubles.tiny_qwen3_vl import COORD_IDS, VOCAB_LEN, bin_of
from conformance.doubles.tokenizer import make_vocabulary
from conformance.learn.loss_cases import MASK, RULES, random_logits
from conformance.learn.segments import make_row, make_segment
from conformance.objectives.answers import answer, box, element, ids
from conformance.scenarios.configs import LONG, config_with, not_refused, refusal_of
from rollmatch.cli.objectives import loss_rules_of
from rollmatch.objectives.rollout_matching.loss import LossRules, LossTotals, count_totals, masked_loss, slot_losses
from rollmatch.objectives.rollout_matching.match import MatchRules
from rollmatch.objectives.rollout_matching.objective import RolloutMatching
from rollmatch.objectives.rollout_matching.supervision import (
    IGNORED,
    MaskRules,
    SupervisionOutsideTarget,
    TransportRules,
    coordinate_targets,
    mask_row,
    mask_segment,
)
from rollmatch.records import Geometry, GroundTruth, PredictedObject, Rollout, Sample, Segment, Supervision

SAMPLE = Sample(sample_id=0, origin="x:1", images=(), objects=(), width=8, height=8)
SMALL = {"rules": MaskRules(), "bin_of": lambda token_id: token_id - 20 if 20 <= token_id < 30 else None}


def small_segment(**changes):
    """Prompt 7 7, prefix 1 22 2, tail 3 25 9; 20 to 29 are coordinates."""
    fields = {"prompt_len": 2, "prefix_len": 3, "coord_positions": (3,), "coord_bins": (4,)}
    fields["token_ids"] = (7, 7, 1, 22, 2, 3, 25, 9)
    return Segment(sample=SAMPLE, policy_version=1, **(fields | changes))


def segment_of(text, *objects):
    sample = Sample(sample_id=0, origin="x:1", images=(), objects=objects, width=8, height=8)
    rollout = Rollout(
        request_id="0.0.0", prompt_token_ids=(0,), response_token_ids=ids(text), finish_reason="stop", policy_version=1
    )
    made, _ = RolloutMatching(make_vocabulary(), MatchRules(), TransportRules()).make_segments([sample], [rollout])
    return made[0]


def labels_of(segment, *, desc_ce_weight=1.0):
    rules = MaskRules(desc_ce_weight=desc_ce_weight)
    return mask_segment(segment, rules=rules, bin_of=make_vocabulary().bin_of)


@pytest.mark.scenario(
    "supervision/a-matched-object-is-corrected-in-place",
    clauses=[
        "supervision/prompt-and-prefix-text-are-never-labels#1,2,3",
        "supervision/the-appended-tail-is-learnt-in-full#1,3",
    ],
)
def test_a_matched_object_is_corrected_in_place():
    made = mask_segment(small_segment(), **SMALL)
    assert {place: label for place, label in enumerate(made.labels) if label != IGNORED} == {5: 3, 7: 9}
    assert list(zip(made.coord_positions, made.coord_bins, strict=True)) == [(3, 4), (6, 5)]
    assert made.weights == (0.0,) * 5 + (1.0, 0.0, 1.0)


@pytest.mark.scenario(
    "supervision/a-slot-in-the-prompt-is-refused", clauses=["supervision/prompt-and-prefix-text-are-never-labels#4"]
)
def test_a_supervised_position_outside_the_target_is_refused():
    with pytest.raises(SupervisionOutsideTarget) as caught:
        mask_segment(small_segment(token_ids=(7, 22, 1, 22, 2, 3, 25, 9), coord_positions=(1,)), **SMALL)
    assert (caught.value.code, caught.value.key) == ("supervision-outside-target", "x:1")
    assert mask_segment(small_segment(coord_positions=(3,)), **SMALL).coord_positions[0] == 3


@pytest.mark.scenario(
    "supervision/a-false-positive-teaches-nothing",
    clauses=[
        "supervision/prompt-and-prefix-text-are-never-labels#2",
        "target/every-target-is-json-with-every-true-object-once#3",
    ],
)
def test_a_false_positive_teaches_nothing():
    segment = segment_of(answer(element()))
    made = labels_of(segment)
    tail = segment.prompt_len + segment.prefix_len
    assert segment.prefix_len > 10
    assert made.labels[:tail] == (IGNORED,) * tail
    assert made.coord_positions == ()


@pytest.mark.scenario(
    "supervision/the-stop-token-is-a-label", clauses=["supervision/the-appended-tail-is-learnt-in-full#1"]
)
def test_the_stop_token_is_a_label():
    for text in (answer(), answer(element()), "prose"):
        for objects in ((), (box(),)):
            assert labels_of(segment_of(text, *objects)).labels[-1] == make_vocabulary().stop_id


@pytest.mark.scenario(
    "supervision/descriptions-can-be-left-out", clauses=["supervision/the-appended-tail-is-learnt-in-full#2"]
)
def test_descriptions_can_be_left_out():
    segment = segment_of(answer(), box(desc="seven"))
    made, pieces = labels_of(segment, desc_ce_weight=0), list(map(make_vocabulary().piece, segment.token_ids))
    starts = [sum(map(len, pieces[:place])) for place in range(len(pieces))]
    at = b"".join(pieces).index(b"seven")
    touched = [p for p in range(len(pieces)) if starts[p] < at + 5 and starts[p] + len(pieces[p]) > at]
    assert touched
    assert all(made.labels[place] == IGNORED for place in touched)
    closing = [p for p in range(len(pieces)) if starts[p] + len(pieces[p]) > b"".join(pieces).rindex(b"]}")]
    assert all(made.labels[place] == segment.token_ids[place] for place in closing)
    half = labels_of(segment, desc_ce_weight=0.5)
    assert {half.weights[place] for place in touched} == {0.5}


@pytest.mark.scenario(
    "supervision/all-coordinate-weights-at-zero-are-refused",
    clauses=["supervision/coordinates-are-learnt-as-distributions-over-bins#2,6"],
)
def test_all_coordinate_weights_at_zero_are_refused():
    refused = refusal_of("~.soft_ce_weight=0", "~.w1_weight=0", "~.gate_weight=0")
    assert refused == ("coordinates-unsupervised", f"{LONG}soft_ce_weight")
    rules = config_with().custom.extra.rollout_matching
    assert (rules.soft_ce_weight, rules.w1_weight, rules.gate_weight) == (1.0, 1.0, 0.0)


@pytest.mark.scenario("supervision/one-weight-above-zero-is-accepted")
def test_one_weight_above_zero_is_accepted():
    with not_refused():
        rollout = config_with("~.soft_ce_weight=0", "~.w1_weight=0", "~.gate_weight=0.1").custom.extra.rollout_matching
    assert rollout.gate_weight == 0.1


@pytest.mark.scenario(clauses=["supervision/coordinates-are-learnt-as-distributions-over-bins#1"])
def test_a_slot_costs_the_weighted_sum_of_three_terms():
    logits, bins = random_logits(3), torch.tensor([0, 500, 999])

    def slots(**weights):
        zero = {"soft_ce_weight": 0.0, "w1_weight": 0.0, "gate_weight": 0.0}
        rules = LossRules(coord_ids=COORD_IDS, **(zero | weights))
        return slot_losses(logits, bins=bins, rules=rules)[0]

    parts = [slots(soft_ce_weight=1.0), slots(w1_weight=1.0), slots(gate_weight=1.0)]
    whole = slots(soft_ce_weight=0.5, w1_weight=2.0, gate_weight=3.0)
    assert all(float(part.min()) > 0 for part in parts)
    assert torch.allclose(whole, 0.5 * parts[0] + 2.0 * parts[1] + 3.0 * parts[2])
    coordinates = logits[:, list(COORD_IDS)]
    assert torch.allclose(parts[2], logits.logsumexp(-1) - coordinates.logsumexp(-1), atol=1e-5)
    rules = config_with("~.gate_weight=0.25").custom.extra.rollout_matching
    template = type("T", (), {"vocabulary": make_vocabulary()})
    assert loss_rules_of(rules, template).gate_weight == 0.25


def slot_loss(logits, true_bin, **weights):
    """Of one slot whose logits are given; the layout is that of the tiny model."""
    zero = {"soft_ce_weight": 0.0, "w1_weight": 0.0, "gate_weight": 0.0}
    rules = LossRules(coord_ids=COORD_IDS, **(zero | weights))
    return float(slot_losses(logits[None], bins=torch.tensor([true_bin]), rules=rules)[0])


@pytest.mark.scenario(
    "supervision/every-bin-is-equally-likely",
    clauses=["supervision/coordinates-are-learnt-as-distributions-over-bins#3"],
)
def test_every_bin_is_equally_likely():
    logits = torch.full((VOCAB_LEN,), -1e4)
    logits[list(COORD_IDS)] = 0.0
    assert slot_loss(logits, 500, soft_ce_weight=1.0) == pytest.approx(6.9078, abs=1e-4)
    assert config_with().custom.extra.rollout_matching.target_sigma == 2.0


@pytest.mark.scenario(
    "supervision/the-prediction-is-ten-bins-off",
    clauses=["supervision/coordinates-are-learnt-as-distributions-over-bins#4"],
)
def test_the_prediction_is_ten_bins_off():
    logits = torch.full((VOCAB_LEN,), -1e4)
    logits[COORD_IDS[510]] = 0.0
    assert slot_loss(logits, 500, w1_weight=1.0) == pytest.approx(0.01, abs=1e-4)


@pytest.mark.scenario(
    "supervision/half-of-the-probability-leaves-the-coordinates",
    clauses=["supervision/coordinates-are-learnt-as-distributions-over-bins#5"],
)
def test_half_of_the_probability_leaves_the_coordinates():
    logits = torch.zeros(2000)
    rules = LossRules(coord_ids=tuple(range(1000)), soft_ce_weight=0.0, w1_weight=0.0, gate_weight=1.0)
    loss = slot_losses(logits[None], bins=torch.tensor([7]), rules=rules)[0]
    assert float(loss) == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.scenario(
    "supervision/a-polygon-predicted-for-a-true-box",
    clauses=["supervision/coordinates-are-learnt-as-distributions-over-bins#7"],
)
def test_a_polygon_predicted_for_a_true_box():
    bins = (100, 100, 300, 100, 300, 300, 100, 300)
    found = PredictedObject(desc="a", geometry=Geometry.POLY, bins=bins, positions=tuple(range(8)))
    true = GroundTruth(desc="a", geometry=Geometry.BBOX, bins=(110, 90, 320, 310))
    assert coordinate_targets(found, true, TransportRules()) == (110, 90, 320, 90, 320, 310, 110, 310)


@pytest.mark.scenario(
    "supervision/four-rows-at-once-or-one-after-the-other",
    clauses=["supervision/the-loss-does-not-depend-on-how-a-step-is-cut-up#1,2"],
)
def test_four_rows_at_once_or_one_after_the_other():
    segments = [make_segment(seed, num_slots=2 * (seed % 4))[0] for seed in range(8)]
    logits = {s.sample.sample_id: random_logits(s.encoded_len, s.sample.sample_id) for s in segments}
    totals = count_totals([mask_segment(segment, **MASK) for segment in segments])

    def learn(rows):
        leaves, loss = {name: some.clone().requires_grad_() for name, some in logits.items()}, 0.0
        for row in rows:
            states = torch.cat([leaves[segment.sample.sample_id] for segment in row])
            terms = masked_loss(states, supervision=mask_row(make_row(*row), **MASK), rules=RULES, totals=totals)
            terms.total.backward()
            loss += float(terms.total.detach())
        return loss, torch.cat([leaves[name].grad.flatten() for name in sorted(leaves)])

    once, several = learn([segments]), learn([segments[i : i + 2] for i in range(0, 8, 2)])
    assert once[0] == pytest.approx(several[0], abs=1e-5)
    assert float((once[1] - several[1]).abs().max()) < 1e-5


@pytest.mark.scenario(
    "supervision/nothing-to-learn", clauses=["supervision/the-loss-does-not-depend-on-how-a-step-is-cut-up#3"]
)
def test_nothing_to_learn():
    empty = Supervision(
        labels=(IGNORED,) * 4, weights=(0.0,) * 4, coord_positions=(), coord_bins=(), coord_in_prefix=()
    )
    logits = torch.randn(4, VOCAB_LEN, requires_grad=True)
    totals = LossTotals(text_weight=0.0, num_slots=0)
    loss = masked_loss(logits, supervision=empty, rules=RULES, totals=totals).total
    assert float(loss) == 0
    loss.backward()
    assert not logits.grad.any()


def test_the_layout_has_coordinates():
    assert bin_of(COORD_IDS[3]) == 3
