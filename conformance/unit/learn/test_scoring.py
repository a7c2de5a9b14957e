"""A loss in the place of the output head: the same loss, within the model's own forward pass."""

import pytest
import torch

from conformance.doubles.loss_cases import RULES, ScoringSupervisor
from conformance.doubles.models import TOLERANCE
from conformance.doubles.segments import make_segment
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3
from rollmatch.learn.balance import PassSize
from rollmatch.learn.batch import Batcher
from rollmatch.learn.head import Scoring, logprobs_of, losing_logits
from rollmatch.learn.score import score_segments
from rollmatch.model.images import NO_IMAGES
from rollmatch.objectives.rollout_matching.loss import count_totals, masked_loss


def score_of(batch):
    totals = count_totals([batch.supervision])
    return lambda logits: masked_loss(logits, supervision=batch.supervision, rules=RULES, totals=totals).total


class Capped(torch.nn.Module):
    """A model that does something to its logits."""

    def __init__(self):
        super().__init__()
        self.inner = make_tiny_qwen3()

    def forward(self, **inputs):
        out = self.inner(**inputs)
        out.logits = 30 * torch.tanh(out.logits / 30)
        return out


@pytest.mark.parametrize("size_of_first_loss", [1.0, 0.0, 1e-5])
def test_a_model_that_does_something_to_its_logits_is_scored_on_them(size_of_first_loss):
    """Whatever the first loss is: one near 0 comes out of a cap as it went in, as where all advantages are 0."""
    model = Capped()
    batcher = Batcher(model.inner, ScoringSupervisor(), packer=None, pad_id=0)
    (batch,) = batcher.make([make_segment(0)[0]], lambda sample: NO_IMAGES, num_batches=1)
    scoring, score = Scoring(model.inner.lm_head), score_of(batch)
    scoring(model, batch.inputs, lambda logits: size_of_first_loss * score(logits))
    loss, _ = scoring(model, batch.inputs, score)
    plain, _ = Scoring(None)(model, batch.inputs, score)
    assert torch.equal(loss, plain)
    assert scoring.head is None


def test_the_head_is_itself_again_whatever_happens():
    model = make_tiny_qwen3()

    def fails(logits):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError), losing_logits(model.lm_head, fails):
        model(input_ids=torch.tensor([[1, 2]]))
    assert "forward" not in model.lm_head.__dict__
    own = model.lm_head.forward = lambda hidden: hidden
    with losing_logits(model.lm_head, lambda logits: logits.hidden.sum()) as made:
        model(input_ids=torch.tensor([[1, 2]]))
    assert len(made) == 1
    assert model.lm_head.forward is own


class Whole(torch.nn.Module):
    """A model that makes all logits, whatever it is asked for, as Qwen-Omni does."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config

    def get_output_embeddings(self):
        return self.inner.get_output_embeddings()

    def forward(self, *, logits_to_keep, **inputs):
        return self.inner(**inputs)


def test_a_model_that_makes_all_logits_has_the_same_log_probabilities():
    model, segments = make_tiny_qwen3(), [make_segment(seed, num_images=0)[0] for seed in range(3)]
    found, expected = (
        score_segments(one, segments, lambda sample: NO_IMAGES, logprobs=logprobs_of, size=PassSize(segments=2))
        for one in (Whole(model), model)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
