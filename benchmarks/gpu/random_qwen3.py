"""A Qwen3 with random weights, of 4B or 135M shape, around the tokenizer of a small model."""

import json
import math
import shutil

import torch

from conformance.doubles.digits import ROOT

SMALL_MODEL = ROOT / "fixtures/models/arithmetic"
SHAPE = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960,
    "max_window_layers": 36, "initializer_range": 0.02,
}  # fmt: skip
"""Of Qwen3-4B."""
SHAPE_135M = SHAPE | {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152, "max_position_embeddings": 8192,
    "max_window_layers": 30,
}  # fmt: skip
"""Of SmolLM2-135M."""


def shaped(shape=SHAPE):
    """An empty model (no memory)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields = json.loads((SMALL_MODEL / "config.json").read_text()) | shape
    fields["layer_types"] = ["full_attention"] * shape["num_hidden_layers"]
    with torch.device("meta"):
        return Qwen3ForCausalLM._from_config(Qwen3Config.from_dict(fields), dtype=torch.bfloat16)


def make_model(directory, mean_len=None, shape=SHAPE):
    """The arithmetic model's tokenizer around random weights; with ``mean_len`` responses are so long on average."""
    shutil.copytree(SMALL_MODEL, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    empty = shaped(shape)
    with torch.device("cuda"):
        model = type(empty)._from_config(empty.config, dtype=torch.bfloat16)
    if mean_len:
        let_stop(model, 1 / mean_len)
    model.save_pretrained(directory)
    del model
    torch.cuda.empty_cache()


@torch.no_grad()
def let_stop(model, probability):
    """Give the stop token this probability at every place.

    All embeddings get one direction in common, so that all last hidden states do, too. The tied head gives every token
    the same logit for it, and the stop token that logit plus what its probability needs.
    """
    weight, stop = model.get_input_embeddings().weight, model.config.eos_token_id
    weight += 5 * weight.std() * torch.randn(weight.shape[1], dtype=weight.dtype, device=weight.device)
    ids = torch.randint(weight.shape[0], (4, 400), device=weight.device)
    hidden = model.model(ids).last_hidden_state.flatten(0, 1).float()
    others = torch.logsumexp(model.lm_head(hidden.to(weight.dtype)).float(), -1).mean()
    mean = hidden.mean(0)
    weight[stop] = ((others + math.log(probability)) * mean / mean.square().sum()).to(weight.dtype)
