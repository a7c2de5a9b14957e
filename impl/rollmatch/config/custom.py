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
    """What the policy is asked, the same for every sample."""

    system: str = SYSTEM_PROMPT
    """The system message; empty leaves it out."""
    user: Text = USER_PROMPT
    """The text after the images in the user message."""


class ExtraConfig(Section):
    """Settings of the trainer variants."""

    rollout_matching: RolloutMatchingConfig = RolloutMatchingConfig()
    """Settings of trainer_variant rollout_matching_sft; rollouts of every variant are made as it says."""
    grpo: GrpoConfig = GrpoConfig()
    """Settings of trainer_variant grpo; groups, rewards and policy gradient of vineppo and vineppo_mcts."""
    vineppo: VinePpoConfig = VinePpoConfig()
    """Settings of trainer_variant vineppo and vineppo_mcts."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """What answers the policy turn by turn, where a response has several."""
    rollout_server: RolloutServerConfig = RolloutServerConfig()
    """What rollmatch serve starts."""
    swift: SwiftConfig = SwiftConfig()
    """What only ms-swift wants to know."""


class CustomConfig(Section):
    """The trainer, its data and its prompts."""

    trainer_variant: Literal["rollout_matching_sft", "grpo", "vineppo", "vineppo_mcts"] = Field(
        examples=["rollout_matching_sft"]
    )
    """What is trained for."""
    train_jsonl: Text = Field(examples=["data/train.jsonl"])
    """Training samples, one JSON object per line."""
    val_jsonl: Text = Field(examples=["data/val.jsonl"])
    """Evaluation samples, one JSON object per line."""
    image_root: Text | None = None
    """Directory at which image paths start; null takes the directory of each JSONL file."""
    object_ordering: Literal["as_given", "sorted"] = "as_given"
    """Order of a sample's objects: as in the file, or by top edge and then left edge."""
    prompts: PromptsConfig = PromptsConfig()
    """What the policy is asked."""
    extra: ExtraConfig = ExtraConfig()
    """Settings of the trainer variants."""

    @property
    def learns_from_rewards(self) -> bool:
        """Whether answers are judged by reward functions, and not taught."""
        return self.trainer_variant != "rollout_matching_sft"

    @property
    def chat_system(self) -> str | None:
        """The system message of samples that bring their own question; None where the variant takes none of these."""
        return self.prompts.system if self.learns_from_rewards else None
