"""Models with real tokenizers: which tokenizer, architecture and number of rows belong together, and their directories.

Weights are random and small, except those of SmolLM2.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.doubles.checkpoints import make_checkpoint
from conformance.tools.tokenizers import fetch_tokenizer


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """One row of the table of models."""

    title: str
    tokenizer: str
    """Of ``conformance.tools.tokenizers``."""
    architecture: str
    """Of ``conformance/doubles/architectures.yaml``."""
    has_weights: bool = False
    """Whether the tokenizer's directory has weights of this architecture."""
    num_rows: int = 0
    """Rows of the published model's embedding: fewer than ids of the tokenizer (Gemma 3), or more."""
    attention: str | None = None
    """``model.attn_impl`` of its runs where the default is refused."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the published model, where the architecture's differ."""


QWEN_ROWS, LLAMA_ROWS = 151_936, 128_256
EVERYWHERE = {"sliding_window": None}
"""Attention to all of the past, as from Mistral 7B v0.2 on."""
REAL_MODELS = {
    "qwen3": RealModel(title="Qwen3", architecture="qwen3", tokenizer="qwen3", num_rows=QWEN_ROWS),
    "qwen3_moe": RealModel(title="Qwen3 MoE", architecture="qwen3_moe", tokenizer="qwen3", num_rows=QWEN_ROWS),
    "qwen3_vl": RealModel(
        title="Qwen3-VL",
        architecture="qwen3_vl",
        tokenizer="qwen3_vl",
        num_rows=QWEN_ROWS,
    ),
    "qwen3_vl_moe": RealModel(
        title="Qwen3-VL MoE",
        architecture="qwen3_vl_moe",
        tokenizer="qwen3_vl",
        num_rows=QWEN_ROWS,
    ),
    "gemma3_text": RealModel(
        title="Gemma 3, text",
        architecture="gemma3_text",
        tokenizer="gemma3",
        num_rows=262_144,
    ),
    "gemma3": RealModel(
        title="Gemma 3",
        architecture="gemma3",
        tokenizer="gemma3",
        num_rows=262_208,
    ),
    "llama3": RealModel(
        title="Llama 3, base layout",
        architecture="llama",
        tokenizer="llama3",
        num_rows=LLAMA_ROWS,
    ),
    "llama3_1": RealModel(title="Llama 3.1", architecture="llama", tokenizer="llama3_1", num_rows=LLAMA_ROWS),
    "llama2": RealModel(title="Llama 2's form", architecture="llama", tokenizer="llama2", num_rows=32_000),
    "mistral_v1": RealModel(
        title="Mistral 7B v0.1",
        architecture="mistral",
        tokenizer="llama2",
        num_rows=32_000,
    ),
    "mistral_v3": RealModel(
        title="Mistral 7B v0.3",
        architecture="mistral",
        tokenizer="mistral_v3",
        num_rows=32_768,
        settings=EVERYWHERE,
    ),
    "mistral_nemo": RealModel(
        title="Mistral Nemo",
        architecture="mistral",
        tokenizer="mistral_nemo",
        num_rows=131_072,
        settings=EVERYWHERE,
    ),
    "tekken": RealModel(
        title="Mistral with `tekken.json` alone",
        architecture="mistral",
        tokenizer="tekken",
        num_rows=131_072,
        settings=EVERYWHERE,
    ),
    "deepseek_v3": RealModel(
        title="DeepSeek V3",
        architecture="deepseek_v3",
        tokenizer="deepseek_v3",
        num_rows=129_280,
    ),
    "gpt_oss": RealModel(
        title="gpt-oss with `attn_impl: eager`",
        architecture="gpt_oss",
        tokenizer="gptoss",
        num_rows=201_088,
        attention="eager",
    ),
    "smollm2": RealModel(
        title="SmolLM2-135M-Instruct, real weights", architecture="llama", tokenizer="smollm2", has_weights=True
    ),
}


def make_real_model(name: str, directory: Path) -> Path:
    """The directory of a model with all its files, below ``directory`` where it has to be made."""
    known, real = REAL_MODELS[name], fetch_tokenizer(REAL_MODELS[name].tokenizer)
    if known.has_weights:
        return real
    make_checkpoint(known.architecture, directory, real=real, vocab_size=known.num_rows, **known.settings)
    return directory
