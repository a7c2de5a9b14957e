"""GRPO on the digits in this process, as overrides."""

from conformance.doubles.digits import scenes

GRPO = (
    "custom.trainer_variant=grpo",
    "custom.extra.grpo.num_generations=3",
    "custom.extra.grpo.rewards=[{function: conformance.doubles.rewards:digit_sum},"
    " {function: conformance.doubles.rewards:num_digits, weight: 0.5}]",
    "custom.extra.rollout_matching.decoding.temperature=1",
    "custom.extra.rollout_matching.max_new_tokens=24",
    "training.per_device_train_batch_size=2",
    "training.learning_rate=0.1",
)
BRIEF = "custom.extra.rollout_matching.max_new_tokens=16"
"""Up to two coordinates, and no stop: rewards differ."""


ONE_GROUP = (BRIEF, "training.per_device_train_batch_size=1")
WINDOW = (*ONE_GROUP, "custom.extra.grpo.num_iterations=2", "custom.extra.grpo.steps_per_generation=2")
SAMPLES = scenes("train")[:12]
