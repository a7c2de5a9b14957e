"""The section ``custom.extra.environment``: responses of several turns, and who answers them."""

from typing import Any, Literal

from pydantic import Field

from rollmatch.config.section import Count, Section, Text


class EnvironmentConfig(Section):
    """What answers the policy turn by turn, and pays it in place of reward functions; for grpo, vineppo, vineppo_mcts.

    A turn ends with the stop token, or at rollout_matching's max_new_tokens.
    """

    name: Text | None = None
    """A class as module:Class; null is none: a response is one turn."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments by name that the class is made with."""
    max_turns: Count = 16
    """Most turns of an episode."""
    max_response_tokens: Count = 1024
    """Most tokens of all turns and observations of an episode together; it ends where no further turn fits."""
    observations: Literal["chat", "text"] = "chat"
    """How observations follow a turn: as the chat template writes a user's message, or as their bare text."""
