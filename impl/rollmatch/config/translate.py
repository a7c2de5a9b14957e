"""pydantic's findings, told in this package's errors."""

from collections.abc import Mapping
from types import MappingProxyType

from pydantic_core import ErrorDetails

from rollmatch.config.nearest import nearest
from rollmatch.errors import ConfigError


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
