"""A loss in the place of the output head: the same loss, within the model's own forward pass."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.doubles.adapters import adapted
from conformance.doubles.loss_cases import RULES, ScoringSupervisor
from conformance.doubles.models import TOLERANCE
from conformance.doubles.records import segment_with
from conformance.doubles.segments import make_segment
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3
from rollmatch.learn.balance import PassSize
from rollmatch.learn.batch import Batcher
from rollmatch.learn.head import Scoring, logprobs_of, losing_logits
from rollmatch.learn.score import score_segments, score_without_adapters
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


def one_by_one(model, segment):
    """Of a segment alone, in the plainest way."""
    ids = torch.tensor([segment.token_ids])
    rows = model(input_ids=ids).logits[0].log_softmax(-1)
    return [rows[place - 1, ids[0, place]].item() for place in range(segment.prompt_len, len(ids[0]))]


def dropping():
    """A model that learns, with dropout."""
    model = make_tiny_qwen3().train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model


LENGTHS = st.tuples(st.integers(1, 9), st.integers(1, 9))
MODEL = make_tiny_qwen3()


@pytest.mark.parametrize("model", [MODEL, Whole(MODEL), dropping()])
@given(st.lists(LENGTHS, min_size=1, max_size=6), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_log_probabilities_do_not_depend_on_what_a_segment_is_padded_with(model, lengths, size):
    """Prompts and targets of any lengths, in any order; also by a model that makes all logits, or that learns."""
    ids, was_learning = random.Random(len(lengths)), model.training
    segments = [
        segment_with(tuple(ids.choices(range(100), k=prompt + target)), prompt_len=prompt) for prompt, target in lengths
    ]
    found = score_segments(
        model, segments, lambda sample: NO_IMAGES, logprobs=logprobs_of, size=PassSize(segments=size)
    )
    assert model.training == was_learning
    with torch.no_grad():
        for segment, ours in zip(segments, found, strict=True):
            assert ours == pytest.approx(one_by_one(MODEL, segment), abs=TOLERANCE)


def test_a_reference_is_the_model_without_adapters_and_dropout():
    model, ids = adapted(model=dropping()), torch.arange(20)[None]
    found = score_without_adapters(model, {"input_ids": ids}, lambda logits: logits, Scoring(None))
    assert torch.allclose(found, MODEL(input_ids=ids).logits[0], atol=TOLERANCE)
    assert model.training
