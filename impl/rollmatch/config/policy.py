"""The sections ``model`` and ``tuner``: which policy is trained, and which part of it."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from rollmatch.config.section import Count, Section, ShareBelowOne, Text


def _module_regex(value: str) -> str:
    if re.search(r"\s", value):
        raise PydanticCustomError("regex_white_space", "Input should be a regular expression without white space")
    try:
        re.compile(value)
    except re.error as error:
        reason = {"reason": str(error)}
        raise PydanticCustomError(
            "regex_malformed", "Input should be a regular expression ({reason})", reason
        ) from None
    return value


class ModelConfig(Section):
    """The policy."""

    model: Text = Field(examples=["models/qwen3-vl-coord"])
    """Directory of a saved Hugging Face model with tokenizer; hub ids are not downloaded."""
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; auto takes what the model's config.json says."""
    attn_impl: Literal[
        "packed", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"
    ] = "packed"
    """Attention of the learner; packed keeps the segments of a row from seeing each other on any device."""


class TunerConfig(Section):
    """Which weights learn."""

    train_type: Literal["full", "lora"] = "full"
    """full trains all weights that are not frozen, lora trains adapters."""
    use_dora: bool = False
    """Split adapters into magnitude and direction (DoRA); needs train_type lora."""
    lora_rank: Count = 8
    """Rank of the adapter matrices."""
    lora_alpha: Count = 16
    """Scale of the adapter: its output is multiplied by lora_alpha / lora_rank."""
    lora_dropout: ShareBelowOne = 0.0
    """Dropout in front of the adapter."""
    target_regex: Annotated[str, Field(min_length=1), AfterValidator(_module_regex)] | None = None
    """Regular expression that must match a module's whole name to adapt it; null adapts all linear layers."""
    freeze_llm: bool = False
    """Keep the language model as it is."""
    freeze_vit: bool = False
    """Keep the vision tower as it is."""
    freeze_aligner: bool = False
    """Keep the projector between vision tower and language model as it is."""
