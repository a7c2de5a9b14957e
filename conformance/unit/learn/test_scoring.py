"""A loss in the place of the output head: the same loss, within the model's own forward pass."""

from functools import partial

import pytest
import torch

from conformance.doubles.loss_cases import RULES, ScoringSupervisor
from conformance.doubles.models import TOLERANCE, assert_same_gradients, gradients, make_packed_model
from conformance.doubles.segments import make_segment
from conformance.doubles.tiny_qwen3_vl import VOCAB_LEN, make_tiny_qwen3
from rollmatch.learn.balance import PassSize
from rollmatch.learn.batch import Batcher
from rollmatch.learn.head import HeadStates, Scoring, logprobs_of, losing_logits
from rollmatch.learn.pack import Packer
from rollmatch.learn.score import score_segments
from rollmatch.model import policy
from rollmatch.model.images import NO_IMAGES
from rollmatch.objectives.rollout_matching.loss import count_totals, logit_indices, masked_loss, masked_loss_of_kept


def micro_batch(model, *, packed):
    pairs = [make_segment(seed, num_images=count) for seed, count in enumerate((1, 0, 2))]
    images = {segment.sample.sample_id: some for segment, some in pairs}
    packer = Packer(10_000, max_buffered=8) if packed else None
    batcher = Batcher(model, ScoringSupervisor(), packer=packer, pad_id=0)
    (batch,) = batcher.make([s for s, _ in pairs], lambda sample: images[sample.sample_id], num_batches=1)
    return batch


def score_of(batch):
    score = masked_loss_of_kept if batch.is_packed else masked_loss
    totals = count_totals([batch.supervision])
    return lambda logits: score(logits, supervision=batch.supervision, rules=RULES, totals=totals).total


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_scored_in_the_head_a_batch_has_the_loss_and_gradient_of_its_logits(packed, learns):
    """A tied head that learns is called again by backward; one that does not has its slopes made in forward."""
    model = make_packed_model()
    model.lm_head.weight.requires_grad_(learns)
    batch = micro_batch(model, packed=packed)

    def learnt(head):
        model.zero_grad()
        loss, _ = Scoring(head)(model, batch.inputs, score_of(batch))
        loss.backward()
        return loss.item(), gradients(model)

    plain, in_head = learnt(None), learnt(model.lm_head)
    assert in_head[0] == pytest.approx(plain[0], rel=TOLERANCE)
    assert_same_gradients(in_head[1], plain[1])
    assert model.lm_head(torch.zeros(1, 128)).shape == (1, VOCAB_LEN)
    seen = []
    Scoring(model.lm_head)(model, batch.inputs, lambda logits: seen.append(logits) or logits.hidden.sum())
    assert [type(one) for one in seen] == [HeadStates], "no logits are made where the loss takes their place"
    num_rows = len(logit_indices(batch.supervision)) if packed else batch.inputs["input_ids"].numel()
    assert seen[0].hidden.shape[-1] == 128
    assert seen[0].hidden.numel() == 128 * num_rows


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


@pytest.mark.parametrize("in_head", [True, False])
def test_a_model_that_makes_all_logits_has_the_same_log_probabilities(in_head, monkeypatch):
    """Some models take no ``logits_to_keep``, and ignore it: their rows are others."""
    monkeypatch.setattr(policy, "LARGE_VOCABULARY", 0 if in_head else VOCAB_LEN + 1)
    model, pairs = make_tiny_qwen3(), [make_segment(seed, num_images=0)[0] for seed in range(3)]

    def scored():
        return score_segments(model, pairs, lambda sample: NO_IMAGES, logprobs=logprobs_of, size=PassSize(segments=2))

    expected, forward = scored(), model.forward
    monkeypatch.setattr(model, "forward", lambda *, logits_to_keep, **inputs: forward(**inputs))
    for ours, theirs in zip(scored(), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)


@pytest.mark.parametrize("learns", [True, False])
def test_log_probabilities_without_gradients_are_those_of_logits(learns, monkeypatch):
    model, pairs = make_tiny_qwen3(), [make_segment(seed, num_images=0)[0] for seed in range(3)]
    model.lm_head.weight.requires_grad_(learns)

    def scored():
        return score_segments(
            model,
            pairs,
            lambda sample: NO_IMAGES,
            logprobs=partial(logprobs_of, temperature=0.7),
            size=PassSize(segments=2),
        )

    plain = scored()
    assert policy.head_worth_avoiding(model) is None
    monkeypatch.setattr(policy, "LARGE_VOCABULARY", VOCAB_LEN)
    assert policy.head_worth_avoiding(model) is model.lm_head
    assert [len(one) for one in plain] == [segment.train_len for segment in pairs]
    for ours, theirs in zip(scored(), plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
