"""What ``rollmatch import-config`` reads: a YAML of TRL or ms-swift, or a command line, with its script."""

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import yaml

from rollmatch.config.layers import EXTENDS, SHORT
from rollmatch.config.schema import RunConfig
from rollmatch.errors import ConfigError
from rollmatch.interop.import_script import read_script
from rollmatch.launch.processes import shell_line


def read_source(words: Sequence[str]) -> tuple[str, dict[str, object]]:
    """(``trl`` or ``swift``, keys) of a command line or a YAML. Errors: ``import-source-unreadable``."""
    variables = [*takewhile(lambda word: re.match(r"\w+=", word), words)]
    words = words[len(variables) :] or words
    program = next((place for place, word in enumerate(words) if word.endswith("swift/cli/rlhf.py")), None)
    if program is not None:  # behind torchrun, deepspeed or accelerate launch
        words = ["swift", "rlhf", *words[program + 1 :]]
    if words[0] in ("swift", "trl"):
        fields = read_words([f"--{one}" for one in variables]) | read_words(words[2:])
        inner = fields.pop("config", None)
        fields = (_read_yaml(str(inner)) if inner else {}) | fields
        command = next(iter(words[1:]), "")
        method = fields.get("rlhf_type", "grpo") if command == "rlhf" else command
        return words[0], _check_method(fields, method)
    if words[0] == "megatron":  # its options may name a script, too
        problem = f"{words[0]} is ms-swift's trainer on Megatron, whose options have no counterpart"
        remedy = "Give the options of ms-swift itself behind swift rlhf; rollmatch plan finds a split of GPUs."
        raise ConfigError(problem, code="import-source-unreadable", key="SOURCE", remedy=remedy)
    for place, word in enumerate(words):
        if word.endswith(".py"):  # behind python, torchrun or accelerate launch with their options
            given = read_words(words[place + 1 :])
            return "trl", read_script(Path(word), is_called=bool(given)) | given
    if len(words) > 1:
        problem = f"{shell_line(words, {})} begins with neither swift nor trl"
        raise ConfigError(
            problem,
            code="import-source-unreadable",
            key="SOURCE",
            remedy="Give one YAML, or the whole command after --.",
        )
    fields = _read_yaml(words[0])
    _check_method(fields, fields.get("rlhf_type", "grpo"))
    return ("swift" if "rlhf_type" in fields or "model" in fields else "trl"), fields


def _check_method(fields: dict[str, object], method: object) -> dict[str, object]:
    if method != "grpo":
        problem = f"trains by {method}, and only GRPO is imported"
        remedy = "docs/guides has configurations of SFT (grpo.md) and of learning from teachers (distill.md)."
        raise ConfigError(problem, code="import-source-unreadable", key="SOURCE", remedy=remedy)
    return fields


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
    read = {name: [_value_of(value) for value in values] for name, values in found.items()}
    return {name: True if not values else values[0] if len(values) == 1 else values for name, values in read.items()}


def _value_of(text: str) -> object:
    """What YAML reads; the text itself where that is none, such as ``...`` of documentation or a backtick.

    >>> _value_of("1e-4"), _value_of("..."), _value_of("`")
    ('1e-4', '...', '`')
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


OWN_KEYS = {EXTENDS, *SHORT, *RunConfig.model_fields} - {"model"}


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
    if OWN_KEYS & fields.keys() or isinstance(fields.get("model"), dict):
        problem, remedy = f"{path} is a configuration of rollmatch already", "Use it as it is: rollmatch check."
        raise ConfigError(problem, code="import-source-unreadable", key="SOURCE", remedy=remedy)
    return fields
