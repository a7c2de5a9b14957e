"""Packed attention by a flash kernel on a GPU: the numbers of one segment after the other, and sealed."""

from dataclasses import replace

import pytest
import torch

from conformance.doubles.models import make_packed_model, packed_logits
from conformance.doubles.segments import make_group, make_row, make_segment
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3
from rollmatch.learn import attention
from rollmatch.learn.attention import packed_attention, varlen_for

LENGTHS = (1, 7, 128, 300, 2, 65, 513)
BF16 = 2**-7
"""Relative: one bit of bfloat16's eight."""

pytestmark = pytest.mark.gpu(1)


@pytest.fixture
def one_by_one(monkeypatch):
    """``with``-less switch: attention goes segment by segment from here on."""
    return lambda: monkeypatch.setattr(attention, "varlen_for", lambda query, *, dropout: None)


def states_of(num_tokens, *, num_heads=32, num_groups=8, head_len=128):
    torch.manual_seed(0)
    shapes = [(1, heads, num_tokens, head_len) for heads in (num_heads, num_groups, num_groups)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def bounds_of(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


def attended(states, lengths, **keys):
    module = make_tiny_qwen3().model.layers[0].self_attn
    module.num_key_value_groups = states[0].shape[1] // states[1].shape[1]
    out, _ = packed_attention(module, *states, None, cu_seq_lens_q=bounds_of(lengths), scaling=0.09, **keys)
    grads = torch.autograd.grad(out.float().square().sum(), states)
    return [out.detach(), *grads]


@pytest.mark.parametrize(("num_groups", "head_len"), [(32, 64), (8, 128), (1, 32)])
def test_all_at_once_is_one_by_one_forward_and_backward(one_by_one, num_groups, head_len):
    states = states_of(sum(LENGTHS), num_groups=num_groups, head_len=head_len)
    assert varlen_for(states[0], dropout=0.0) is not None
    ours = attended(states, LENGTHS)
    one_by_one()
    for name, mine, plain in zip(("out", "dq", "dk", "dv"), ours, attended(states, LENGTHS), strict=True):
        difference = (mine.float() - plain.float()).norm() / plain.float().norm()
        assert difference < BF16, name


def test_a_shared_prompt_is_attended_to_by_all_its_segments(one_by_one):
    """Gradients of a prompt are those of all that attend to it; the second prompt has one segment of one token."""
    own, seen = (300, 7, 128, 65, 41, 1, 19), (300, 307, 428, 365, 41, 42, 19)
    keys = {"cu_seq_lens_k": bounds_of(seen)}
    states = states_of(sum(own))
    ours = attended(states, own, **keys)
    one_by_one()
    for name, mine, plain in zip(("out", "dq", "dk", "dv"), ours, attended(states, own, **keys), strict=True):
        difference = (mine.float() - plain.float()).norm() / plain.float().norm()
        assert difference < BF16, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_a_shared_prompt_are_those_of_whole_segments(dtype):
    pairs = [pair for seed in range(3) for pair in make_group(seed, 4, num_images=seed)]
    row, images = make_row(*(segment for segment, _ in pairs)), [features for _, features in pairs]
    shared = replace(row, shares_prompts=True)
    whole, gradient = logits_of(row, images, dtype=dtype)
    few, same = logits_of(shared, images, dtype=dtype)
    assert shared.num_tokens < row.num_tokens
    for start, moved, segment in zip(row.offsets, shared.offsets, row.segments, strict=True):
        first, last = segment.prompt_len - 1, segment.encoded_len
        expected, found = whole[start + first : start + last], few[moved + first : moved + last]
        assert (found - expected).norm() < (BF16 if dtype is torch.bfloat16 else 1e-4) * expected.norm()
    assert gradient.norm() > 0 < same.norm()


def test_a_segment_is_untouched_by_its_neighbours():
    states = states_of(sum(LENGTHS))
    before = attended(states, LENGTHS)[0].split(LENGTHS, dim=1)
    start = sum(LENGTHS[:3])
    for part in states:
        part.data[:, :, start : start + LENGTHS[3]] += 1
    after = attended(states, LENGTHS)[0].split(LENGTHS, dim=1)
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True] * 3 + [False] + [True] * 3


def batch():
    pairs = [make_segment(seed, num_images=count) for seed, count in enumerate((1, 2, 0, 3))]
    return make_row(*(segment for segment, _ in pairs)), [images for _, images in pairs]


def logits_of(row, images, *, dtype, autocast=False, checkpointing=False):
    model = make_packed_model().to("cuda", dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        logits = packed_logits(model, row, images).float()
    logits.square().mean().backward()
    gradient = model.model.language_model.layers[0].self_attn.q_proj.weight.grad
    return logits.detach(), gradient.float()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_vision_language_model_learns_the_same(one_by_one, autocast, checkpointing):
    """With images and their positions in three dimensions; against float32 on the same device, one by one."""
    dtype = torch.float32 if autocast else torch.bfloat16
    ours = logits_of(*batch(), dtype=dtype, autocast=autocast, checkpointing=checkpointing)
    one_by_one()
    plain = logits_of(*batch(), dtype=dtype, autocast=autocast)
    exact = logits_of(*batch(), dtype=torch.float32)
    for mine, other, true in zip(ours, plain, exact, strict=True):
        rounding = (other - true).norm()
        assert (mine - true).norm() < 1.5 * rounding + 1e-6 * true.norm()


def test_in_float32_it_goes_one_by_one():
    assert varlen_for(states_of(4)[0].float(), dropout=0.0) is None
