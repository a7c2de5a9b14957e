"""Forward passes that tests compare: packed, one by one, padded."""

import torch

from conformance.doubles.tiny_qwen3_vl import PAD_ID, make_tiny_qwen3_vl
from rollmatch.learn.attention import use_packed_attention
from rollmatch.learn.batch import make_model_inputs, make_padded_inputs

TOLERANCE = 1e-5
"""float32, logits of a few units: what reordered sums may differ by; a leak differs by 1e-1 and more."""


def make_packed_model(seed: int = 0):
    model = make_tiny_qwen3_vl(seed)
    use_packed_attention(model)
    return model


def packed_logits(model, row, images):
    """[T, V]."""
    return model(**make_model_inputs(row, images=images, model=model)).logits[0]


def single_logits(model, segment, images):
    """[L, V], by transformers' own positions and masks, nothing of ours."""
    inputs = {"input_ids": torch.tensor([segment.token_ids])}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
    inputs |= images.tensors
    return model(**inputs, use_cache=False).logits[0]


def padded_logits(model, segments, images):
    """[B, L, V]."""
    return model(**make_padded_inputs(segments, images=images, model=model, pad_id=PAD_ID)).logits


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        scale = theirs[name].abs().max().clamp_min(1e-3)
        assert ((gradient - theirs[name]).abs().max() / scale) < TOLERANCE, name
