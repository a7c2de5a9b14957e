"""The section ``custom.extra.environment``: responses of several turns, and who answers them."""

from typing import Any, Literal

from pydantic import Field

from rollmatch.config.section import Count, Section, Text


class EnvironmentConfig(Section):
    """Responses of several turns (grpo, vineppo, vineppo_mcts): a class replies to each turn and gives the rewards."""

    name: Text | None = None
    """The environment, as module:Class; null is none: a response is one turn."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    max_turns: Count = 16
    """Most turns of an episode. Unit: turns."""
    max_response_tokens: Count = 1024
    """Longest episode, turns and observations together; it ends when no further turn fits. Unit: tokens."""
    observations: Literal["chat", "text"] = "chat"
    """Format of an observation: a user message by the chat template, or plain text."""
