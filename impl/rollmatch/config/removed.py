"""Keys that earlier configurations had: refused, with the place to go."""

from collections.abc import Mapping
from types import MappingProxyType

from rollmatch.config.rollout_server import RolloutServerConfig
from rollmatch.config.yaml_dialect import Tree
from rollmatch.errors import ConfigError

ROLLOUT_MATCHING = "custom.extra.rollout_matching"

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        f"{ROLLOUT_MATCHING}.temperature": f"Use {ROLLOUT_MATCHING}.decoding.temperature.",
        f"{ROLLOUT_MATCHING}.top_p": f"Use {ROLLOUT_MATCHING}.decoding.top_p.",
        f"{ROLLOUT_MATCHING}.top_k": f"Use {ROLLOUT_MATCHING}.decoding.top_k.",
        f"{ROLLOUT_MATCHING}.rollout_buffer": "Remove it: asynchronous prefetch replaces it.",
        f"{ROLLOUT_MATCHING}.post_rollout_pack_scope": "Remove it: left-over segments are carried to the next row.",
        "training.packing_length": "Use global_max_length, which is the length of a packed row.",
        "rollout_matching": f"Move it to {ROLLOUT_MATCHING}.",
    }
)
"""Dotted key -> what to do instead."""
_SERVER = "custom.extra.rollout_server"
MISPLACED: Mapping[str, str] = MappingProxyType(
    {
        f"rlhf.{name}": f"Move it to {_SERVER}.{name}."
        for name in RolloutServerConfig.model_fields
        if name.startswith("vllm_")
    }
)
"""The same for settings of the rollout server's engine, which ms-swift ignores where the learner is told."""


class RemovedKey(ConfigError):
    """A key that this configuration does not have any more, with any value."""

    code = "removed-key"


class EngineSettingInRlhf(ConfigError):
    """An engine setting stands where the rollout server reads it."""

    code = "engine-setting-in-rlhf"


def find_removed(tree: Tree) -> list[ConfigError]:
    """All removed and misplaced keys a tree holds.

    >>> [error.key for error in find_removed({"training": {"packing_length": None, "seed": 1}})]
    ['training.packing_length']
    """
    tables = (
        (RemovedKey, "this key is not supported any more", REMOVED),
        (EngineSettingInRlhf, "the rollout server does not read this key", MISPLACED),
    )
    return [
        rule(problem, key=key, remedy=remedy)
        for rule, problem, table in tables
        for key, remedy in table.items()
        if _holds(tree, key.split("."))
    ]


def _holds(tree: Tree, names: list[str]) -> bool:
    here: object = tree
    for name in names:
        if not isinstance(here, dict) or name not in here:
            return False
        here = here[name]
    return True
