"""The section ``custom.extra.swift``: what only ms-swift wants to know."""

from typing import Any

from pydantic import Field

from rollmatch.config.section import Section, Text


class SwiftConfig(Section):
    """Settings that only ms-swift's commands need."""

    model_type: Text | None = None
    """ms-swift's name of the architecture, such as qwen3_vl; null lets ms-swift detect it."""
    template: Text | None = None
    """ms-swift's name of the chat template, such as qwen3_vl; null lets ms-swift detect it."""
    rollout_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of swift rollout, by name without dashes. Options that another section sets are rejected."""
    rlhf_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of swift rlhf, by name without dashes. Options that another section sets are rejected."""
