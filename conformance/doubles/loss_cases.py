"""Rows, logits and comparisons shared by the tests of the loss."""

import torch

from conformance.doubles.models import TOLERANCE
from conformance.doubles.segments import make_row, make_segment
from conformance.doubles.tiny_qwen3_vl import COORD_IDS, VOCAB_LEN, bin_of
from rollmatch.learn.head import HeadStates
from rollmatch.objectives.grpo.loss import supervise_policy
from rollmatch.objectives.rollout_matching.loss import LossRules, count_totals, logit_indices, masked_loss
from rollmatch.objectives.rollout_matching.supervision import MaskRules, mask_segment, mask_segments

RULES = LossRules(coord_ids=COORD_IDS, gate_weight=0.5)
MASK = {"rules": MaskRules(desc_ce_weight=0.3), "bin_of": bin_of}
FIELDS = ("total", "ce", "coord")


def row_of(pairs):
    return make_row(*(segment for segment, _ in pairs)), [images for _, images in pairs]


def mask_row(row, **rules):
    """As the batcher has a row supervised."""
    return mask_segments(row.segments, starts=row.offsets, num_tokens=row.num_tokens, **(MASK | rules))


def masked_loss_from_hidden(hidden, *, lm_head, **scoring):
    """The loss of last hidden states [T, H], without logits."""
    return masked_loss(HeadStates.of(hidden, lm_head), **scoring)


def random_logits(num_tokens, seed=0):
    return 3 * torch.randn(num_tokens, VOCAB_LEN, generator=torch.Generator().manual_seed(seed))


def same_terms(ours, theirs):
    for field in FIELDS:
        torch.testing.assert_close(
            getattr(ours, field), getattr(theirs, field), rtol=TOLERANCE, atol=TOLERANCE, msg=field
        )


def scoring_of(supervision, rules=RULES):
    """Arguments of a loss whose step is this supervision alone."""
    return {"supervision": supervision, "rules": rules, "totals": count_totals([supervision])}


def scored_segment(seed=0, **shape):
    """Logits of one segment, and arguments of its loss."""
    segment, _ = make_segment(seed, **shape)
    return random_logits(segment.encoded_len), scoring_of(mask_segment(segment, **MASK))


def supervision_of(*segments):
    starts = [sum(each.encoded_len for each in segments[:place]) for place in range(len(segments))]
    return supervise_policy(segments, starts=starts, num_tokens=sum(each.encoded_len for each in segments))


class ScoringSupervisor:
    logit_indices = staticmethod(logit_indices)

    @staticmethod
    def supervise(segments, *, starts, num_tokens):
        return mask_segments(segments, starts=starts, num_tokens=num_tokens, **MASK)
