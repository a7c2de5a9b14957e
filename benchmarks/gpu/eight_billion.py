"""A text model with the shape of Qwen3-8B: its directory without numbers, and its weights on a GPU, random."""

import json
import shutil
import struct
from pathlib import Path

import torch

from rollmatch.weights.plan import Merge

ROOT = Path(__file__).parents[2]
HIDDEN, INNER, IDS, NUM_LAYERS, QUERIES, KEYS, HEAD = 4096, 12288, 151936, 36, 4096, 1024, 128
LINEARS = {
    "self_attn.q_proj": (QUERIES, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, QUERIES),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": IDS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "attention_bias": False,
}


def shapes(num_layers=NUM_LAYERS):
    """Name -> shape of every tensor of the checkpoint."""
    shapes = {"model.embed_tokens.weight": (IDS, HIDDEN)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in LINEARS.items()}
        shapes |= {f"{prefix}.self_attn.{name}.weight": (HEAD,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{prefix}.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (IDS, HIDDEN)}


def make_directory(directory, num_layers=NUM_LAYERS):
    """All that a server reads to start with placeholders; the file of weights is a hole of the right size."""
    shutil.copytree(
        ROOT / "fixtures/models/arithmetic",
        directory,
        ignore=shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json"),
    )
    (Path(directory) / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))
    header, start = {}, 0
    for name, shape in shapes(num_layers).items():
        stop = start + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    encoded = json.dumps(header).encode()
    with (Path(directory) / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + start)


def random_weights(device, num_layers=NUM_LAYERS):
    """Name -> bfloat16 tensor."""
    generator = torch.Generator(device).manual_seed(0)
    made = {}
    for name, shape in shapes(num_layers).items():
        made[name] = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator)
    return made


def random_adapter(device, num_layers=NUM_LAYERS, *, rank=16):
    """(name, tensor) of a DoRA on every linear, and its merges, as ``weights.named_weights`` has them."""
    tensors, merges = [], []
    for layer in range(num_layers):
        for short, (num_out, num_in) in LINEARS.items():
            name = f"model.layers.{layer}.{short}"
            parts = {"lora_a": (rank, num_in), "lora_b": (num_out, rank), "magnitude": (num_out,)}
            names = {part: f"{name}.{part}" for part in parts}
            merges.append(Merge(name=f"{name}.weight", scaling=2.0, **names))
            tensors += [(f"{name}.{part}", torch.randn(shape, device=device)) for part, shape in parts.items()]
    return tensors, merges
