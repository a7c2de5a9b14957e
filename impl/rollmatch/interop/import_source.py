"""What ``rollmatch import-config`` reads: a YAML of TRL or ms-swift, or a command line."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from rollmatch.errors import ConfigError
from rollmatch.launch.processes import shell_line


def read_source(words: Sequence[str]) -> tuple[str, dict[str, object]]:
    """(``trl`` or ``swift``, keys) of a command line or a YAML. Errors: ``import-source-unreadable``."""
    if words[0] in ("swift", "trl"):
        fields = read_words(words[2:])
        inner = fields.pop("config", None)
        return words[0], (_read_yaml(str(inner)) if inner else {}) | fields
    if len(words) > 1:
        problem = f"{shell_line(words, {})} begins with neither swift nor trl"
        raise ConfigError(
            problem,
            code="import-source-unreadable",
            key="SOURCE",
            remedy="Give one YAML, or the whole command after --.",
        )
    fields = _read_yaml(words[0])
    return ("swift" if "rlhf_type" in fields or "model" in fields else "trl"), fields


def read_words(words: Sequence[str]) -> dict[str, object]:
    """Options of a command line; values are read as YAML.

    >>> read_words(["--beta", "0.04", "--reward_funcs", "a", "b", "--use_vllm", "--epsilon=0.3"])
    {'beta': 0.04, 'reward_funcs': ['a', 'b'], 'use_vllm': True, 'epsilon': 0.3}
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, is_joined, value = word[2:].partition("=")
            found[name] = [value] if is_joined else []
        elif name:
            found[name].append(word)
        else:
            raise ConfigError(
                f"{word} follows no option", code="import-source-unreadable", key="SOURCE", remedy="Write --name value."
            )
    read = {name: [yaml.safe_load(value) for value in values] for name, values in found.items()}
    return {name: True if not values else values[0] if len(values) == 1 else values for name, values in read.items()}


def _read_yaml(path: str) -> dict[str, object]:
    try:
        fields = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path}: {error}", code="import-source-unreadable", key="SOURCE", remedy="Give a readable YAML file."
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{path} holds no keys",
            code="import-source-unreadable",
            key="SOURCE",
            remedy="Give a YAML of key: value lines.",
        )
    return fields
