"""Configurations that scenarios speak of: a valid one, with dotted keys laid over it."""

import pytest

from rollmatch.config import RunConfig, make
from rollmatch.config.layers import merge, parse_overrides
from rollmatch.errors import ErrorList, RollmatchError

LONG = "custom.extra.rollout_matching."
VALID = {
    "model": {"model": "models/tiny"},
    "custom": {"trainer_variant": "rollout_matching_sft", "train_jsonl": "train.jsonl", "val_jsonl": "val.jsonl"},
    "global_max_length": 1024,
    "training": {"output_dir": "runs/one"},
}
GRPO = (
    "custom.trainer_variant=grpo",
    "custom.extra.grpo.rewards=[{function: builtins:len}]",
    "~.decoding.temperature=1",
)


def config_with(*overrides: str) -> RunConfig:
    """``a.b=value`` over the valid config; ``~.`` stands for the long section."""
    return make(merge(VALID, parse_overrides([override.replace("~.", LONG, 1) for override in overrides])))


def problems_of(*overrides: str) -> list[RollmatchError]:
    """What the check of such a config refuses."""
    with pytest.raises(ErrorList) as caught:
        config_with(*overrides)
    return list(caught.value.errors)


def refusal_of(*overrides: str) -> tuple[str, str]:
    """Code and key of the only problem."""
    (problem,) = problems_of(*overrides)
    return problem.code, problem.key


def rejected(*overrides: str) -> list[tuple[str, str]]:
    """Code and key of all problems, ``~.`` for the long section; each says what is wrong and what to do."""
    problems = problems_of(*overrides)
    assert all(error.problem and error.remedy for error in problems)
    return [(error.code, error.key.replace(LONG, "~.")) for error in problems]
