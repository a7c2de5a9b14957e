"""Capability ``supervision``, scenario by scenario."""

import pytest
import torch

from conformance.doubles.answers import answer, box, ids
from conformance.doubles.configs import config_with
from conformance.doubles.loss_cases import MASK, RULES, mask_row, random_logits
from conformance.doubles.records import make_rollout, make_sample
from conformance.doubles.segments import make_row, make_segment
from conformance.doubles.tiny_qwen3_vl import COORD_IDS, VOCAB_LEN
from conformance.doubles.tokenizer import make_vocabulary
from rollmatch.objectives.rollout_matching.loss import LossRules, count_totals, masked_loss, slot_losses
from rollmatch.objectives.rollout_matching.match import MatchRules, TransportRules
from rollmatch.objectives.rollout_matching.supervision import IGNORED, MaskRules, mask_segment
from rollmatch.objectives.rollout_matching.target import RolloutMatching
from rollmatch.run.objectives import loss_rules_of


def segment_of(text, *objects):
    sample, rollout = make_sample(*objects), make_rollout(ids(text), prompt_token_ids=(0,))
    made, _ = RolloutMatching(make_vocabulary(), MatchRules(), TransportRules()).make_segments([sample], [rollout])
    return made[0]


def labels_of(segment, *, desc_ce_weight=1.0):
    rules = MaskRules(desc_ce_weight=desc_ce_weight)
    return mask_segment(segment, rules=rules, bin_of=make_vocabulary().bin_of)


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
    "supervision/every-bin-is-equally-likely",
    clauses=["supervision/coordinates-are-learnt-as-distributions-over-bins#3"],
)
def test_every_bin_is_equally_likely():
    logits = torch.full((1, VOCAB_LEN), -1e4)
    logits[:, list(COORD_IDS)] = 0.0
    rules = LossRules(coord_ids=COORD_IDS, soft_ce_weight=1.0, w1_weight=0.0, gate_weight=0.0)
    assert float(slot_losses(logits, bins=torch.tensor([500]), rules=rules)) == pytest.approx(6.9078, abs=1e-4)
    configured = config_with("~.gate_weight=0.25").custom.extra.rollout_matching
    assert configured.target_sigma == 2.0
    template = type("T", (), {"vocabulary": make_vocabulary()})
    assert loss_rules_of(configured, template).gate_weight == 0.25


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
            terms = masked_loss(states, supervision=mask_row(make_row(*row)), rules=RULES, totals=totals)
            terms.total.backward()
            loss += float(terms.total.detach())
        return loss, torch.cat([leaves[name].grad.flatten() for name in sorted(leaves)])

    once, several = learn([segments]), learn([segments[i : i + 2] for i in range(0, 8, 2)])
    assert once[0] == pytest.approx(several[0], abs=1e-5)
    assert float((once[1] - several[1]).abs().max()) < 1e-5
