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
    """The policy that is trained."""

    model: Text = Field(examples=["models/qwen3-vl-coord"])
    """Directory of a saved Hugging Face model with its tokenizer."""
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the learner's weights. auto reads it from config.json."""
    attn_impl: Literal[
        "packed", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"
    ] = "packed"
    """Attention of the learner. packed isolates the segments of a row on every device; the other names are those of
    transformers."""


class TunerConfig(Section):
    """Which weights are trained."""

    train_type: Literal["full", "lora"] = "full"
    """full trains every weight that is not frozen; lora trains adapters (peft)."""
    use_dora: bool = False
    """Use DoRA adapters (magnitude and direction). Needs train_type: lora."""
    lora_rank: Count = 8
    """Rank r of the adapter matrices. Unit: dimensions."""
    lora_alpha: Count = 16
    """Adapter scale: the adapter's output is multiplied by lora_alpha / lora_rank. Unit: ratio."""
    lora_dropout: ShareBelowOne = 0.0
    """Dropout before the adapter. Unit: probability."""
    target_regex: Annotated[str, Field(min_length=1), AfterValidator(_module_regex)] | None = None
    """Regular expression for the full names of the modules to adapt. null adapts all linear layers."""
    freeze_llm: bool = False
    """Freeze the language model."""
    freeze_vit: bool = False
    """Freeze the vision tower."""
    freeze_aligner: bool = False
    """Freeze the projector between vision tower and language model."""
