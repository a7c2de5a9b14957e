"""YAML file -> checked tree, all errors reported together."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollmatch.config.findings import find_removed, nearest, translate
from rollmatch.config.layers import holds, merge, nest, parse_overrides, read_tree, value_at
from rollmatch.config.rules import check_rules
from rollmatch.config.schema import RunConfig, fields, section_of
from rollmatch.config.yaml_dialect import Tree
from rollmatch.errors import ConfigError, ErrorList, RollmatchError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file with all it extends, lay overrides (``a.b.c=value``) over it, and check the result.

    Does not look at files that the configuration names; ``check_files`` does.

    Errors: ``ErrorList`` of ``ConfigError``.
    """
    errors: list[RollmatchError] = []
    layers = [_read(partial(read_tree, path), errors), _read(partial(parse_overrides, overrides), errors)]
    if errors:
        raise ErrorList(errors)
    return make(merge(*layers))


def make(tree: Tree) -> RunConfig:
    """Check a plain tree. Errors: ``ErrorList`` of ``ConfigError``, ordered by key."""
    errors = find_removed(tree)
    for error in errors:
        tree = _without(tree, error.key.split("."))
    config, faults = _validate(tree)
    errors += faults
    errors += check_rules(config, wrong_keys=_wrong_keys(errors))
    if errors:
        raise ErrorList(sorted(errors, key=lambda error: error.key))
    return config


def _read(layer: Callable[[], Tree], errors: list[RollmatchError]) -> Tree:
    try:
        return layer()
    except ErrorList as several:
        errors += several.errors
        return {}


def _validate(tree: Tree) -> tuple[RunConfig, list[ConfigError]]:
    """The tree as far as it is right, stand-ins elsewhere, and what was wrong with it.

    Each round takes out what pydantic found, until it finds nothing: so rules over several keys can still be judged.
    """
    errors: dict[str, ConfigError] = {}
    stand_ins: set[tuple[int | str, ...]] = set()
    while True:
        try:
            return RunConfig.model_validate(_with_sections(tree)), list(errors.values())
        except ValidationError as found:
            for detail in sorted(found.errors(), key=_unknown_first):
                error = translate(detail)
                is_missing = detail["type"] == "missing"
                assert is_missing or detail["loc"] not in stand_ins, f"{error.key} refuses its own example"
                if is_missing:
                    stand_ins.add(detail["loc"])
                if not any(f"{error.key}.".startswith(f"{known}.") for known in errors):
                    errors[error.key] = error
                tree = _mended(_with_sections(tree), detail) if _is_there(tree, detail) else tree


def _unknown_first(detail: ErrorDetails) -> bool:
    """Sort key: an unknown key explains why a required one is missing."""
    return detail["type"] != "extra_forbidden"


def _with_sections(tree: Tree) -> Tree:
    """Absent sections, and null in their place, as empty ones, so that each missing key is reported by its own name.

    >>> _with_sections({"tuner": None})["tuner"]
    {}
    """
    for key, field in fields().items():
        if section_of(field) is not None:
            empty = nest(key.split("."), {})
            tree = merge(empty, tree)
            is_null = holds(tree, key.split(".")) and value_at(tree, key) is None
            tree = merge(tree, empty) if is_null else tree
    return tree


def _is_there(tree: Tree, found: ErrorDetails) -> bool:
    """Whether no earlier finding of the round has taken the key out; a list and its items may both be wrong."""
    names = [str(part) for part in found["loc"]]
    known = [count for count in range(1, len(names) + 1) if ".".join(names[:count]) in fields()]
    return found["type"] == "missing" or holds(tree, names[: max(known, default=0)])


def _mended(tree: Tree, found: ErrorDetails) -> Tree:
    names = [str(part) for part in found["loc"]]
    field = fields().get(".".join(names)) if all("." not in name for name in names) else None
    if found["type"] != "missing" or field is None:  # an item of a list has no stand-in: the list goes
        return _without(tree, names)
    return merge(tree, nest(names, (field.examples or [None])[0]))


def _without(tree: Tree, names: Sequence[str]) -> Tree:
    """The tree less one key; less the value that holds it when that is no mapping.

    >>> _without({"a": {"b": 1, "c": 2}}, ["a", "b"]), _without({"a": {"b": [5]}}, ["a", "b", "0"])
    ({'a': {'c': 2}}, {'a': {}})
    """
    name, *below = names
    rest = {key: value for key, value in tree.items() if key != name}
    held = tree.get(name)
    if below and isinstance(held, dict) and below[0] in held:
        return {**rest, name: _without(held, below)}
    return rest


def _wrong_keys(errors: Sequence[ConfigError]) -> set[str]:
    """Keys that are wrong, and those that unknown keys probably stand for.

    >>> [sorted(_wrong_keys([ConfigError("", code=code, key="training.max_step")])) for code in ("x", "unknown-key")]
    [['training.max_step'], ['training.max_step', 'training.max_steps']]
    """
    meant = {nearest(error.key) for error in errors if error.code == "unknown-key"}
    return {error.key for error in errors} | {key for key in meant if key is not None}
