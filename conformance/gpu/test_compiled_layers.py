"""Compiled layers and adaptive checkpointing on a real GPU, with the real compiler and real memory."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollmatch.learn.attention import PACKED_ATTENTION, pieces_of
from rollmatch.learn.checkpointing import AdaptiveCheckpointing
from rollmatch.model.decoder_layers import compile_layers, decoder_layers

pytestmark = pytest.mark.gpu(1)
SEGMENT, NUM_LAYERS = 512, 12


def make_model(*, adapters=False):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        attn_implementation=PACKED_ATTENTION,
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    if adapters:
        get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", init_lora_weights="gaussian")).cuda()
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def learn(model, num_segments):
    """Loss of a packed row, after its backward pass; every second one shares a prompt of its first segment."""
    num_tokens = SEGMENT * num_segments
    ids = torch.randint(512, (1, num_tokens), generator=torch.Generator().manual_seed(num_segments)).cuda()
    seen = [SEGMENT] + [SEGMENT * (1 + num_segments % 2)] * (num_segments - 1)
    bounds = torch.arange(0, num_tokens + 1, SEGMENT), torch.tensor([0, *seen]).cumsum(0)
    pieces = pieces_of(bounds, num_tokens=num_tokens, device=torch.device("cuda"))
    positions = torch.arange(SEGMENT, device="cuda").repeat(num_segments)[None]
    words = {"cu_seq_lens_q": pieces.bounds[0], "pieces": pieces, "use_cache": False}
    hidden = model.model(input_ids=ids, position_ids=positions, **words).last_hidden_state
    loss = (hidden.float() * torch.linspace(-1, 1, hidden.shape[-1], device="cuda")).pow(2).mean()
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("adapters", [False, True])
def test_losses_and_gradients_are_those_of_eager_layers_within_the_noise_of_bfloat16_by_whole_graphs(adapters):
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = make_model(adapters=adapters), make_model(adapters=adapters)
    compile_layers(compiled)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for num_segments in (2, 3, 5, 4):
            for model in (plain, compiled):
                model.zero_grad()
            assert learn(compiled, num_segments) == pytest.approx(learn(plain, num_segments), rel=5e-3)
            ours, theirs = (
                torch.cat([weight.grad.float().flatten() for weight in model.parameters() if weight.grad is not None])
                for model in (compiled, plain)
            )
            assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.999
    assert 0 < counters["stats"]["unique_graphs"] <= 3, "with and without a shared prompt"
    assert not counters["graph_break"]
    assert not counters["aot_autograd"]["autograd_cache_bypass"], "a later run would trace the layers again"


@pytest.mark.parametrize("room_of", [4, NUM_LAYERS])
def test_as_many_layers_are_kept_as_fit_and_no_more_memory_is_used(room_of):
    model, num_segments = make_model(), 16
    learn(model, num_segments)  # kernels choose their workspace
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    learn(model, num_segments)
    checkpointed = torch.cuda.max_memory_allocated()
    for layer in decoder_layers(model):
        layer.gradient_checkpointing = False
    model.zero_grad()
    learn(model, num_segments)
    kept = torch.cuda.max_memory_allocated()
    limit = checkpointed + (kept - checkpointed) * (room_of + 0.5) / NUM_LAYERS
    model.zero_grad()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    others = total - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    checkpointing = AdaptiveCheckpointing(model.model, decoder_layers(model), share=(limit + others) / total)
    for _ in range(4):
        model.zero_grad()
        learn(model, num_segments)
    torch.cuda.reset_peak_memory_stats()
    model.zero_grad()
    learn(model, num_segments)
    assert torch.cuda.max_memory_allocated() <= limit
    assert room_of - 2 <= checkpointing.num_kept <= room_of
