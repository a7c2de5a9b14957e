"""Unknown, removed and invalid keys as ``ConfigError``, with the key to use instead."""

from collections.abc import Mapping
from difflib import SequenceMatcher, get_close_matches
from types import MappingProxyType

from pydantic_core import ErrorDetails

from rollmatch.config.connection import RolloutServerConfig
from rollmatch.config.schema import fields
from rollmatch.config.yaml_dialect import Tree
from rollmatch.errors import ConfigError


def nearest(key: str) -> str | None:
    """The known key most like an unknown one: in its own section, and failing that anywhere in the tree.

    >>> nearest("training.packing_bufer"), nearest("custom.packing_buffer"), nearest("training.zzz")
    ('training.packing_buffer', 'training.packing_buffer', None)
    """
    section, _, name = key.rpartition(".")
    beside = {path.rpartition(".")[2]: path for path in fields() if path.rpartition(".")[0] == section}
    if close := get_close_matches(name, beside, n=1):
        return beside[close[0]]
    anywhere = {path.rpartition(".")[2] for path in fields()}
    if not (close := get_close_matches(name, sorted(anywhere), n=1, cutoff=0.8)):
        return None
    homes = [path for path in fields() if path.rpartition(".")[2] == close[0]]
    return max(homes, key=lambda path: SequenceMatcher(None, key, path).ratio())


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


class UnknownKey(ConfigError):
    """A key that the tree does not have."""

    code = "unknown-key"


class MissingKey(ConfigError):
    """A key without a default is not there."""

    code = "missing-key"


class WrongType(ConfigError):
    """A value is of another type than its key wants; nothing is converted."""

    code = "wrong-type"


class OutOfRange(ConfigError):
    """A number is too small or too large, or a text or list is empty."""

    code = "out-of-range"


class NotAChoice(ConfigError):
    """A value is none of those its key allows."""

    code = "not-a-choice"


class RegexWhiteSpace(ConfigError):
    """A module pattern holds white space, which no module name does: it would match nothing, silently."""

    code = "regex-white-space"


class RegexMalformed(ConfigError):
    """A module pattern is not a regular expression."""

    code = "regex-malformed"


class RewardMalformed(ConfigError):
    """A reward is named as module:function."""

    code = "reward-malformed"


class ServerUrlInvalid(ConfigError):
    """A server's address is an http or https URL with a host, and nothing after its path."""

    code = "base-url-invalid"


class HostInvalid(ConfigError):
    """A server's machine is named by its name or address alone."""

    code = "host-invalid"


_CLASSES: Mapping[str, tuple[type[ConfigError], str]] = MappingProxyType(
    {
        "missing": (MissingKey, "Add it; it has no default."),
        "literal_error": (NotAChoice, "Choose one of them."),
        "regex_white_space": (RegexWhiteSpace, "Write it on one line, without YAML folding."),
        "regex_malformed": (RegexMalformed, "Correct the expression."),
        "reward_function": (RewardMalformed, "Write package.module:function."),
        "base_url_invalid": (ServerUrlInvalid, "Write scheme, host and port."),
        "host_invalid": (HostInvalid, "Write neither scheme nor port; the port has a list of its own."),
        **dict.fromkeys(
            (
                "greater_than",
                "greater_than_equal",
                "less_than",
                "less_than_equal",
                "finite_number",
                "string_too_short",
                "too_short",
                "out_of_range",
            ),
            (OutOfRange, "Choose a value in that range."),
        ),
    }
)
_WANTED = MappingProxyType({"model_type": "must be a mapping", "dict_type": "must be a mapping"})
_LONGEST_VALUE = 60


def translate(found: ErrorDetails) -> ConfigError:
    """One finding as one error; its key is the dotted path."""
    key = ".".join(str(part) for part in found["loc"])
    if found["type"] == "extra_forbidden":
        meant = nearest(key)
        return UnknownKey("there is no such key", key=key, remedy=f"Did you mean {meant}?" if meant else "Remove it.")
    kind, remedy = _CLASSES.get(found["type"], (WrongType, "Write a value of that type."))
    if kind is MissingKey:
        return MissingKey("this key is required", key=key, remedy=remedy)
    wanted = _WANTED.get(found["type"], found["msg"].replace("Input should be", "must be"))
    return kind(f"{wanted}, but is {_shown(found['input'])}", key=key, remedy=remedy)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
