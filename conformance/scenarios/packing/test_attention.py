"""Packed attention: equal to the unpacked forward, sealed between segments, and plain sdpa otherwise."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    BloomForCausalLM,
    Gemma2ForCausalLM,
    GptOssForCausalLM,
    Lfm2ForCausalLM,
    Lfm2VlForConditionalGeneration,
    LlamaForCausalLM,
    MambaForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from conformance.doubles.models import TOLERANCE, make_packed_model, packed_logits, single_logits
from conformance.doubles.refusals import refused
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3, make_tiny_qwen3_vl
from rollmatch.learn import attention
from rollmatch.learn.attention import (
    PACKED_ATTENTION,
    DeferredMask,
    packed_attention,
    packed_mask,
    pieces_of,
    use_packed_attention,
    why_unpackable,
)
from rollmatch.learn.batch import make_model_inputs


@pytest.fixture(scope="module")
def plain_model():
    return make_tiny_qwen3_vl()


def cut(tensor, row):
    return tensor.split(list(row.lengths))


@pytest.mark.scenario(
    "packing/images-in-every-segment", clauses=["packing/segments-of-a-row-do-not-see-each-other#2,3"]
)
def test_packed_logits_are_the_unpacked_ones(model, plain_model, batch):
    row, images = batch
    with torch.no_grad():
        packed = packed_logits(model, row, images)
        singles = [single_logits(plain_model, s, i) for s, i in zip(row.segments, images, strict=True)]
    assert packed.abs().max() > 1
    for ours, alone in zip(cut(packed, row), singles, strict=True):
        torch.testing.assert_close(ours, alone, rtol=0, atol=TOLERANCE)


def test_packed_logits_are_the_unpacked_ones_in_training_with_checkpointing(plain_model, batch):
    row, images = batch
    model = make_packed_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    packed = packed_logits(model, row, images).detach()
    with torch.no_grad():
        alone = single_logits(plain_model, row.segments[1], images[1])
    torch.testing.assert_close(cut(packed, row)[1], alone, rtol=0, atol=TOLERANCE)


def test_a_model_is_switched_beneath_its_adapters(batch):
    peft = pytest.importorskip("peft")
    row, images = batch
    base = make_tiny_qwen3_vl()
    wrapped = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    use_packed_attention(wrapped)
    assert base.config.text_config._attn_implementation == PACKED_ATTENTION
    assert base.config.vision_config._attn_implementation == "sdpa"
    with torch.no_grad():
        ours = packed_logits(wrapped.eval(), row, images)
        torch.testing.assert_close(ours, packed_logits(make_packed_model(), row, images), rtol=0, atol=TOLERANCE)


def test_no_mask_is_built_for_a_packed_row(model, batch, monkeypatch):
    def no_mask(**kwargs):
        raise AssertionError("a mask was built")

    monkeypatch.setattr(attention, "sdpa_mask", no_mask)
    row, images = batch
    with torch.no_grad():
        packed_logits(model, row, images)
        with pytest.raises(AssertionError, match="a mask was built"):
            model(**_without_bounds(make_model_inputs(row, images=images, model=model)))


def _without_bounds(inputs):
    return {name: part for name, part in inputs.items() if not name.startswith(("cu_seq", "max_length"))}


def test_a_row_without_bounds_gets_the_mask_of_sdpa(model, plain_model, batch):
    row, images = batch
    inputs = _without_bounds(make_model_inputs(row, images=images, model=model))
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, plain_model(**inputs).logits)


def test_attention_of_segments_is_sdpa_of_each_with_grouped_heads():
    torch.manual_seed(0)
    module = make_tiny_qwen3().model.layers[0].self_attn
    query, key, value = torch.randn(1, 4, 9, 32), torch.randn(1, 2, 9, 32), torch.randn(1, 2, 9, 32)
    ours, _ = packed_attention(
        module, query, key, value, None, cu_seq_lens_q=torch.tensor([0, 4, 5, 9]), scaling=0.2, dropout=0.0
    )
    assert ours.shape == (1, 9, 4, 32)
    wide_key, wide_value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    owner = torch.tensor([0] * 4 + [1] + [2] * 4)
    allowed = (owner[:, None] == owner[None]) & torch.ones(9, 9).tril().bool()
    scores = (query @ wide_key.mT * 0.2).masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(ours, (scores.softmax(-1) @ wide_value).transpose(1, 2), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("bounds", "keys"),
    [
        *((bounds, bounds) for bounds in ([0, 4], [1, 9], [0, 5, 5, 9], [0, 6, 4, 9], [0])),
        ([0, 5, 9], [0, 5, 10]),  # a part of the prompt
        ([0, 5, 9], [0, 5, 8]),
        ([0, 5, 9], [0, 6, 10]),  # nothing stands before
        ([0, 5, 9], [0, 5]),
    ],
)
def test_bounds_that_do_not_cut_the_row_are_refused(bounds, keys):
    with refused("packed-bounds-invalid", "cu_seq_lens_q"):
        pieces_of((torch.tensor(bounds), torch.tensor(keys)), num_tokens=9)


@pytest.mark.parametrize(
    ("num_rows", "num_keys", "window", "code", "key"),
    [
        (2, 4, None, "packed-bounds-invalid", "cu_seq_lens_q"),
        (1, 6, None, "packed-bounds-invalid", "cu_seq_lens_q"),
        (1, 4, 2, "sliding-window-packed", "training.packing"),
    ],
)
def test_a_packed_call_is_one_row_without_cache_or_window(num_rows, num_keys, window, code, key):
    module, bounds = make_tiny_qwen3().model.layers[0].self_attn, torch.tensor([0, 4])
    with refused(code, key):
        _call(module, num_rows, num_keys, cu_seq_lens_q=bounds, sliding_window=window)
    _call(module, 1, 4, cu_seq_lens_q=bounds, sliding_window=None)


@pytest.mark.parametrize(
    ("kind", "sizes", "why"),
    [
        (LlamaForCausalLM, {}, ""),
        (MambaForCausalLM, {}, "linear_attention"),
        (Lfm2ForCausalLM, {"layer_types": ["conv", "full_attention"]}, "conv"),
        (Lfm2VlForConditionalGeneration, {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}, "conv"),
        (BloomForCausalLM, {}, "computes attention by itself"),
    ],
)
def test_models_that_would_not_see_the_bounds_are_not_packed(kind, sizes, why):
    """A state that runs through the row, and attention of a model's own: the second segment would see the first."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2} | sizes
    with torch.device("meta"):
        model = kind(kind.config_class(**({"text_config": sizes} if kind.config_class.sub_configs else sizes)))
    assert why in why_unpackable(model)
    assert bool(why) == bool(why_unpackable(model))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (Gemma2ForCausalLM, {"attn_logit_softcapping": 0.5}),
        (GptOssForCausalLM, {"num_local_experts": 2, "num_experts_per_tok": 1}),
        (LlamaForCausalLM, {}),
    ],
)
def test_attention_that_sdpa_would_compute_in_another_way_is_refused(kind, sizes):
    """Caps of scores and sinks: packed attention is the default, and would leave them out, also without packing."""
    config = kind.config_class(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, pad_token_id=0, attn_implementation="eager", **sizes,
    )  # fmt: skip
    model, ids = kind(config).eval(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = model(**inputs).logits
    use_packed_attention(model)
    if sizes:
        with refused("attention-unsupported", "model.attn_impl", remedy="eager"):
            model(**inputs)
    else:
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=TOLERANCE)


def _call(module, num_rows, num_keys, **kwargs):
    query, key = torch.randn(num_rows, 4, 4, 32), torch.randn(num_rows, 2, num_keys, 32)
    return packed_attention(module, query, key, key, None, **kwargs)


def test_a_deferred_mask_is_cooked_once():
    mask = packed_mask(batch_size=1, q_length=4, kv_length=4, allow_is_causal_skip=False, device="cpu")
    assert isinstance(mask, DeferredMask)
    assert mask.tensor is mask.tensor
    assert torch.equal(mask.tensor[0, 0], torch.ones(4, 4).tril().bool())
    interface = AttentionInterface()
    assert (interface["sdpa"], interface[PACKED_ATTENTION]) == (sdpa_attention_forward, packed_attention)
