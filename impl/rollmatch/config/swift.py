"""The section ``custom.extra.swift``: what only ms-swift wants to know."""

from typing import Any

from pydantic import Field

from rollmatch.config.section import Section, Text


class SwiftConfig(Section):
    """What ms-swift's commands are told besides what the other sections say."""

    model_type: Text | None = None
    """ms-swift's name for the architecture, such as qwen3_vl; null lets it guess, if only one fits."""
    template: Text | None = None
    """ms-swift's name for the chat template, such as qwen3_vl; null lets it guess."""
    rollout_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of swift rollout, by its names without dashes; none that another section says."""
    rlhf_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of swift rlhf, by its names without dashes; none that another section says."""
