"""Keys that earlier configurations had: refused, with the place to go."""

from collections.abc import Mapping
from types import MappingProxyType

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


class RemovedKey(ConfigError):
    """A key that this configuration does not have any more, with any value."""

    code = "removed-key"


def find_removed(tree: Tree) -> list[ConfigError]:
    """All removed keys a tree holds.

    >>> [error.key for error in find_removed({"training": {"packing_length": None, "seed": 1}})]
    ['training.packing_length']
    """
    return [
        RemovedKey("this key is not supported any more", key=key, remedy=remedy)
        for key, remedy in REMOVED.items()
        if _holds(tree, key.split("."))
    ]


def _holds(tree: Tree, names: list[str]) -> bool:
    here: object = tree
    for name in names:
        if not isinstance(here, dict) or name not in here:
            return False
        here = here[name]
    return True
