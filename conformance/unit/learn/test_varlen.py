"""The choice of a flash kernel and what it is handed; the kernel itself is stood in for by plain arithmetic."""

import pytest
import torch
from torch._dynamo.utils import counters

from conformance.doubles.models import TOLERANCE, assert_same_gradients, gradients, make_packed_model, packed_logits
from conformance.doubles.refusals import refused
from conformance.doubles.segments import make_group
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3
from rollmatch.learn import attention
from rollmatch.learn.attention import (
    INSTALLED,
    Varlen,
    describe,
    packed_attention,
    pieces_of,
    varlen_for,
    working_dtype,
)
from rollmatch.model.decoder_layers import compile_layers
from rollmatch.records import Row


def reference(query, key, value, bounds_q, bounds_k, longest_q, longest_k, *, scale=None, window_size=(-1, -1)):
    """[T, H, D] by a mask of blocks, aligned at their lower right; asserts what a kernel relies on."""
    assert window_size == (-1, 0)
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    assert (longest_q, longest_k) == tuple(max(bounds.diff().tolist()) for bounds in (bounds_q, bounds_k))
    assert query.dtype == key.dtype == value.dtype
    assert all(part.stride(-1) == 1 for part in (query, key, value))
    lens_q, lens_k = bounds_q.diff(), bounds_k.diff()
    blocks = [torch.ones(q, k).tril(k - q) for q, k in zip(lens_q.tolist(), lens_k.tolist(), strict=True)]
    allowed = torch.block_diag(*blocks).bool()
    return attended(query, key, value, allowed, scale)


def attended(query, key, value, allowed, scale):
    """[T, H, D] where [T, K] is allowed."""
    groups = query.shape[1] // key.shape[1]
    wide_key, wide_value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, wide_key) * scale
    shares = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, wide_value)


@pytest.fixture
def kernel(monkeypatch):
    """All packed rows go through the reference; yields the dtypes it was called with."""
    seen = []

    def call(query, *others, scale=None, window_size=(-1, -1)):
        seen.append(query.dtype)
        return reference(query, *others, scale=scale, window_size=window_size)

    described = describe("reference", call)
    monkeypatch.setattr(attention, "varlen_for", lambda query, *, dropout: described)
    return seen


@pytest.fixture(params=[False, True], ids=["whole", "shared"])
def row_and_images(request, batch):
    """Segments with prompts of their own, or two groups with a prompt each."""
    if not request.param:
        return batch
    pairs = [pair for seed, size in ((1, 3), (2, 1), (3, 2)) for pair in make_group(seed, size, num_images=seed % 3)]
    row = Row(segments=tuple(segment for segment, _ in pairs), capacity=4096, shares_prompts=True)
    assert row.num_tokens < sum(row.lengths)
    return row, [images for _, images in pairs]


def learnt(row, images, *, checkpointing=False):
    model = make_packed_model().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logits = packed_logits(model, row, images)
    (logits * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).sum().backward()
    return logits.detach(), gradients(model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_launch_for_all_segments_gives_the_logits_and_gradients_of_one_by_one(
    row_and_images, checkpointing, monkeypatch
):
    expected = learnt(*row_and_images)
    used = []
    described = describe(
        "reference", lambda *a, scale=None, window_size=None: reference(*a, scale=scale, window_size=window_size)
    )
    monkeypatch.setattr(attention, "varlen_for", lambda query, *, dropout: used.append(1) or described)
    logits, grads = learnt(*row_and_images, checkpointing=checkpointing)
    assert len(used) == 2 * (1 + checkpointing)  # two layers
    torch.testing.assert_close(logits, expected[0], rtol=0, atol=TOLERANCE)
    assert_same_gradients(grads, expected[1])


def traceable(query, key, value, bounds_q, bounds_k, *_, scale=None, window_size=(-1, -1)):
    """As ``reference``, without Python integers."""
    pieces, left = [], []
    for states, bounds in ((query, bounds_q), (key, bounds_k)):
        places = torch.arange(states.shape[0])
        pieces.append(torch.searchsorted(bounds, places, right=True))
        left.append(bounds[pieces[-1]] - places)
    allowed = (pieces[0][:, None] == pieces[1]) & (left[0][:, None] <= left[1])
    return attended(query, key, value, allowed, scale)


@pytest.mark.parametrize("row_and_images", [True], indirect=True, ids=["shared"])
def test_a_layer_with_a_kernel_is_one_graph(row_and_images, monkeypatch):
    expected = learnt(*row_and_images)
    described = describe("traceable", traceable)
    monkeypatch.setattr(attention, "varlen_for", lambda query, *, dropout: described)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")  # engine tests in the same process turn it off
    torch._dynamo.reset()
    counters.clear()
    model = make_packed_model().train()
    compile_layers(model, backend="aot_eager")
    logits = packed_logits(model, *row_and_images)
    (logits * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).sum().backward()
    torch.testing.assert_close(logits, expected[0], rtol=0, atol=TOLERANCE)
    assert_same_gradients(gradients(model), expected[1])
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    torch._dynamo.reset()


def test_a_kernel_gets_what_autocast_computes_in(batch, kernel):
    model = make_packed_model()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        packed_logits(model, *batch)
    assert kernel == [torch.bfloat16] * 2


def module_and_states():
    return make_tiny_qwen3().model.layers[0].self_attn, [torch.randn(1, heads, 9, 32) for heads in (4, 2, 2)]


def test_bounds_are_checked_before_a_kernel_reads_them(kernel):
    module, states = module_and_states()
    with refused("packed-bounds-invalid", "cu_seq_lens_q"):
        packed_attention(module, *states, None, cu_seq_lens_q=torch.tensor([0, 4]))
    assert kernel == []
    out, _ = packed_attention(module, *states, None, cu_seq_lens_q=torch.tensor([0, 4, 9]))
    assert (out.shape, kernel) == ((1, 9, 4, 32), [torch.float32])


@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_kernel_gets_the_models_own_scale(kernel, monkeypatch, scale):
    module, states = module_and_states()
    bounds = {"cu_seq_lens_q": torch.tensor([0, 4, 9]), "scaling": scale}
    out, _ = packed_attention(module, *states, None, **bounds)
    assert kernel == [torch.float32]
    monkeypatch.undo()
    expected, _ = packed_attention(module, *states, None, **bounds)
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("odd", [{"is_causal": False}, {"position_bias": torch.zeros(1, 4, 9, 9)}])
def test_what_a_kernel_cannot_do_goes_one_by_one(kernel, odd):
    module, states = module_and_states()
    packed_attention(module, *states, None, cu_seq_lens_q=torch.tensor([0, 9]), **odd)
    assert kernel == []


def test_values_of_another_length_than_queries_go_one_by_one(kernel):
    """As in DeepSeek-V3: flash kernels refuse them."""
    module, (query, key, value) = module_and_states()
    out, _ = packed_attention(module, query, key, value[..., :16], None, cu_seq_lens_q=torch.tensor([0, 4, 9]))
    assert (out.shape, kernel) == ((1, 9, 4, 16), [])


class OnGpu:
    """Queries as the choice sees them."""

    is_cuda, device = True, torch.device("cpu")

    def __init__(self, dtype=torch.bfloat16, head_len=128):
        self.dtype, self.shape = dtype, (1, 4, 9, head_len)


def test_a_kernel_is_for_halves_on_a_gpu_and_heads_it_knows():
    assert varlen_for(OnGpu(), dropout=0.0) is INSTALLED
    assert INSTALLED.name == "torch.nn.attention.varlen.varlen_attn"
    assert varlen_for(OnGpu(torch.float16, 256), dropout=0.0) is not None
    odd = [OnGpu(torch.float32), OnGpu(head_len=264), OnGpu(head_len=36), torch.zeros(1, 4, 9, 128).bfloat16()]
    assert [varlen_for(query, dropout=0.0) for query in odd] == [None] * 4
    assert varlen_for(OnGpu(), dropout=0.1) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert varlen_for(OnGpu(torch.float32), dropout=0.0) is INSTALLED
        assert working_dtype(torch.zeros(1)) is torch.bfloat16


def test_causality_and_scale_are_passed_in_the_kernels_own_words():
    def flash(q, k, v, a, b, c, d, *, softmax_scale=None, causal=False, window_size=(-1, -1)):
        return (q, k, v, a, b, c, d, softmax_scale, causal, window_size), "the logsumexp"

    def of_torch(q, k, v, a, b, c, d, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        return [q, k, v, a, b, c, d, scale, window_size, enable_gqa]

    bounds = torch.tensor([0, 3, 5]), torch.tensor([0, 3, 8])
    pieces = pieces_of(bounds, num_tokens=5)
    rows = {"pieces": pieces, "scale": 0.5}
    states = ("q", "k", "v", *pieces.bounds, 3, 5, 0.5)
    assert describe("it", flash)("q", "k", "v", **rows) == (*states, True, (-1, -1))
    assert describe("it", of_torch)("q", "k", "v", **rows) == [*states, (-1, 0), True]
    assert describe("no scale", lambda q, k, v, a, b, c, d, is_causal=False: q) is None
    assert describe("no causality", lambda q, k, v, a, b, c, d, scale=None: q) is None
    assert isinstance(describe("both", lambda q, k, v, a, b, c, d, is_causal=False, scale=None: q), Varlen)
