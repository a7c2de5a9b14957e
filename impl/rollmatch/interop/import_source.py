"""What ``rollmatch import-config`` reads: a YAML of TRL or ms-swift, or a command line."""

import ast
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import yaml

from rollmatch.config.layers import EXTENDS, SHORT
from rollmatch.config.schema import RunConfig
from rollmatch.errors import ConfigError
from rollmatch.interop.import_tables import TRL_REWARDS
from rollmatch.launch.processes import shell_line


def read_source(words: Sequence[str]) -> tuple[str, dict[str, object]]:
    """(``trl`` or ``swift``, keys) of a command line or a YAML. Errors: ``import-source-unreadable``."""
    variables = [*takewhile(lambda word: re.match(r"\w+=", word), words)]
    words = words[len(variables) :] or words
    if words[0] in ("swift", "trl"):
        fields = read_words([f"--{one}" for one in variables]) | read_words(words[2:])
        inner = fields.pop("config", None)
        fields = (_read_yaml(str(inner)) if inner else {}) | fields
        command = next(iter(words[1:]), "")
        method = fields.get("rlhf_type", "grpo") if command == "rlhf" else command
        return words[0], _check_method(fields, method)
    for place, word in enumerate(words):
        if word.endswith(".py"):  # behind python, torchrun or accelerate launch with their options
            given = read_words(words[place + 1 :])
            return "trl", _read_script(Path(word), is_called=bool(given)) | given
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
    read = {name: [yaml.safe_load(value) for value in values] for name, values in found.items()}
    return {name: True if not values else values[0] if len(values) == 1 else values for name, values in read.items()}


OWN_KEYS = {EXTENDS, *SHORT, *RunConfig.model_fields} - {"model"}
SCRIPTED = {"GRPOConfig": None, "GRPOTrainer": ("model", "reward_funcs"), "LoraConfig": None}
"""Calls in a script of TRL -> the arguments that are read; None: all."""
PEFT_NAMES = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}


class Expression(str):
    """An argument that is known only once the script runs."""


def _read_script(path: Path, *, is_called: bool) -> dict[str, object]:
    """Arguments of GRPOConfig(...), GRPOTrainer(...), LoraConfig(...) and load_dataset(...).

    Names of reward functions stay names; what is no plain value is an ``Expression``. ``is_called``: the command line
    stands for GRPOConfig(...). Errors: ``import-source-unreadable``.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        problem, remedy = f"{path}: {error}", "Give a readable script."
        raise ConfigError(problem, code="import-source-unreadable", key="SOURCE", remedy=remedy) from error
    fields, constants = dict[str, object](), _constants_of(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.end_col_offset or 0)):
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if name == "map":
            fields["map"] = True
        if name == "load_dataset":
            fields = _dataset_of(call, fields, constants) | fields
        if name not in SCRIPTED:
            continue
        wanted, is_called = SCRIPTED[name], is_called or name == "GRPOConfig"
        named = {one.arg: one.value for one in call.keywords if one.arg is not None}
        if name == "GRPOTrainer":
            named = dict(zip(("model", "reward_funcs"), call.args)) | named
        for key, value in named.items():
            if key == "reward_funcs":
                fields[key] = _functions_of(value, path.stem)
            elif wanted is None or key in wanted:
                fields[PEFT_NAMES.get(key, key) if name == "LoraConfig" else key] = _plain(value, constants)
        fields |= {"use_peft": True} if name == "LoraConfig" else {}
    if not is_called:
        problem, remedy = f"{path} has no GRPOConfig(...)", "Give one that makes it, or its command line after --."
        raise ConfigError(problem, code="import-source-unreadable", key="SOURCE", remedy=remedy)
    if "model" in fields:
        fields["model_name_or_path"] = fields.pop("model")
    return fields


def _constants_of(tree: ast.Module) -> dict[str, object]:
    """Plain values that the script gives names."""
    pairs = [(node.targets[0], node.value) for node in tree.body if isinstance(node, ast.Assign)]
    values = {name.id: _plain(value, {}) for name, value in pairs if isinstance(name, ast.Name)}
    return {name: value for name, value in values.items() if not isinstance(value, Expression)}


def _dataset_of(call: ast.Call, before: Mapping[str, object], constants: Mapping[str, object]) -> dict[str, object]:
    """What ``load_dataset(...)`` reads, under TRL's names; a second call is that of the evaluation."""
    named = dict(zip(("path", "name"), call.args)) | {one.arg: one.value for one in call.keywords if one.arg}
    read = {name: _plain(value, constants) for name, value in named.items()}
    part = read.get("data_files", read.get("split"))
    found = {"dataset_name": read.get("path"), "dataset_config": read.get("name"), "dataset_train_split": part}
    found = {"dataset_test_split": part} if "dataset_name" in before else found
    return {name: value for name, value in found.items() if value is not None}


def _functions_of(node: ast.expr, module: str) -> object:
    """Names of functions of that script or of others, which is how rewards are named."""
    if isinstance(node, ast.List | ast.Tuple):
        return [_functions_of(one, module) for one in node.elts]
    if isinstance(node, ast.Name):
        return node.id if node.id in TRL_REWARDS else f"{module}.{node.id}"
    return ast.literal_eval(node) if isinstance(node, ast.Constant) else ast.unparse(node)


def _plain(node: ast.expr, constants: Mapping[str, object]) -> object:
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Expression(ast.unparse(node))


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
