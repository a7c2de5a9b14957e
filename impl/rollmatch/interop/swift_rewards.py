"""Our reward functions as ms-swift's: a plugin that ``swift rlhf --external_plugins`` imports by its path.

A function that fails for one answer gives None, which ms-swift leaves out of the group.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from swift.rewards import ORM, orms

from rollmatch.config import load_config
from rollmatch.interop.swift_cli import CONFIG_VARIABLE
from rollmatch.objectives.grpo.reward import Reward, judge_all
from rollmatch.records import Sample
from rollmatch.run.plugins import load_rewards
from rollmatch.run.preflight import load_checked


def make_orm(reward: Reward, samples: Mapping[str, Sample]) -> type[Any]:
    """A class of ms-swift's kind; it shows the class's name in its logs."""

    def judge(self: object, completions: Sequence[str], *, origin: Sequence[str], **_: object) -> list[float | None]:
        judged = [samples[name] for name in origin]
        return [each.values[0] for each in judge_all(completions, judged, [reward])]

    return type(reward.name, (ORM,), {"__call__": judge})


def register() -> None:
    """All rewards of the YAML that the environment names."""
    path, *overrides = json.loads(os.environ[CONFIG_VARIABLE])
    config = load_config(path, overrides)
    samples = {sample.origin: sample for part in load_checked(config) for sample in part}
    for reward in load_rewards(config):
        orms[reward.name] = make_orm(reward, samples)


register()
