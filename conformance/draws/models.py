"""Tiny model directories of several families, made once, and a dropout that can be followed."""

import json
import shutil
from pathlib import Path

import torch
from torch.nn import functional
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    TrainerCallback,
)

from conformance.doubles.checkpoints import make_checkpoint

FAMILIES = ("qwen3", "llama", "granite", "gemma3_text", "qwen3_vl")
"""Granite's attention has a scale of its own; Gemma 3 a window, so it cannot be packed; Qwen3-VL takes images."""
PACKABLE = ("qwen3", "llama", "granite", "qwen3_vl")


class SteadyDropout(TrainerCallback):
    """While a run learns, dropout takes its share off all it would have dropped from: no chance in it."""

    def on_train_begin(self, *_, **__):
        functional.dropout = steady


def steady(values, p=0.5, training=True, inplace=False):
    return values * (1 - p) if training else values


def model_directory(family: str, folder: Path, *, dropout: float = 0.0, rows: int = 0) -> Path:
    """The family's checkpoint below ``folder``; logits are sharp, and the stop token is likely now and then.

    ``rows``: of the embedding, where it has more than the tokenizer has tokens.
    """
    path = folder / f"{family}{dropout or rows or ''}"
    if dropout and not path.exists():
        shutil.copytree(model_directory(family, folder), path)
        config = json.loads((path / "config.json").read_text())
        config.get("text_config", config)["attention_dropout"] = dropout
        (path / "config.json").write_text(json.dumps(config))
    if not (path / "done").exists():
        base = make_checkpoint("qwen3" if family == "granite" else family, path)
        model = _granite(base.config) if family == "granite" else base
        if rows:
            model.resize_token_embeddings(rows, mean_resizing=False)
        head = model.get_output_embeddings().weight
        with torch.no_grad():
            head.mul_(1.5)
            head[base.generation_config.eos_token_id] *= 3
        model.generation_config = base.generation_config
        model.save_pretrained(path)
        template = path / "chat_template.jinja"
        template.write_text(f"{{{{ mark | default('') }}}}{template.read_text()}")  # a variable of its own
        (path / "done").touch()
    return path


def _granite(base) -> GraniteForCausalLM:
    torch.manual_seed(0)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "eos_token_id", "pad_token_id", "bos_token_id", "initializer_range")
    own = {"attention_multiplier": 0.5, "logits_scaling": 0.5, "residual_multiplier": 0.7, "embedding_multiplier": 2.0}
    sizes = {name: getattr(base, name) for name in names}
    return GraniteForCausalLM(GraniteConfig(**sizes, **own, tie_word_embeddings=False)).float().eval()
