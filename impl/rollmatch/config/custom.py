"""The section ``custom``: the trainer, its data and its prompts."""

from typing import Literal

from pydantic import Field

from rollmatch.config.environment import EnvironmentConfig
from rollmatch.config.grpo import GrpoConfig
from rollmatch.config.rollout_matching import RolloutMatchingConfig
from rollmatch.config.rollout_server import RolloutServerConfig
from rollmatch.config.section import Section, Text
from rollmatch.config.swift import SwiftConfig
from rollmatch.config.vineppo import VinePpoConfig

SYSTEM_PROMPT = (
    "You list what you see. Answer with exactly one JSON object on one line, and nothing before or after it."
)
USER_PROMPT = (
    'List every object in the image as {"objects": [...]}. Each object has "desc", a short description, and either '
    '"bbox_2d", its box as [x1, y1, x2, y2], or "poly", its outline as [x1, y1, x2, y2, x3, y3, ...]. '
    "Every coordinate is a coordinate token from 0 to 999, in double quotes."
)


class PromptsConfig(Section):
    """The prompt of every sample that does not have its own."""

    system: str = SYSTEM_PROMPT
    """System message; empty omits it."""
    user: Text = USER_PROMPT
    """Text after the images in the user message."""


class ExtraConfig(Section):
    """Settings of generation and of the trainer variants."""

    rollout_matching: RolloutMatchingConfig = RolloutMatchingConfig()
    """Generation of every trainer_variant; matching and losses of rollout_matching_sft."""
    grpo: GrpoConfig = GrpoConfig()
    """Groups, rewards and policy gradient of grpo, vineppo and vineppo_mcts."""
    vineppo: VinePpoConfig = VinePpoConfig()
    """Steps and values of vineppo and vineppo_mcts."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """Responses of several turns."""
    rollout_server: RolloutServerConfig = RolloutServerConfig()
    """What rollmatch serve starts."""
    swift: SwiftConfig = SwiftConfig()
    """Settings that only ms-swift's commands need."""


class CustomConfig(Section):
    """Objective, data and prompts."""

    trainer_variant: Literal["rollout_matching_sft", "grpo", "vineppo", "vineppo_mcts"] = Field(
        examples=["rollout_matching_sft"]
    )
    """The objective: rollout-matching SFT, GRPO, VinePPO, or VinePPO with tree search."""
    train_jsonl: Text = Field(examples=["data/train.jsonl"])
    """Training samples, one JSON object per line."""
    val_jsonl: Text = Field(examples=["data/val.jsonl"])
    """Evaluation samples, one JSON object per line."""
    image_root: Text | None = None
    """Directory of relative image paths; null uses the directory of each JSONL file."""
    object_ordering: Literal["as_given", "sorted"] = "as_given"
    """Order of a sample's objects in the target: as in the file, or sorted by top edge, then left edge."""
    prompts: PromptsConfig = PromptsConfig()
    """The prompt of every sample that does not have its own."""
    extra: ExtraConfig = ExtraConfig()
    """Settings of generation and of the trainer variants."""

    @property
    def learns_from_rewards(self) -> bool:
        """Whether answers are judged by reward functions, and not taught."""
        return self.trainer_variant != "rollout_matching_sft"

    @property
    def chat_system(self) -> str | None:
        """The system message of samples that bring their own question; None where the variant takes none of these."""
        return self.prompts.system if self.learns_from_rewards else None
