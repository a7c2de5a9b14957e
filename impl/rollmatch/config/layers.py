"""A YAML file, all it ``extends``, and ``--set`` overrides, merged into one plain tree."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from rollmatch.config.yaml_dialect import Tree, lines_of, parse_mapping, parse_value
from rollmatch.errors import ConfigError, ErrorList

EXTENDS = "extends"
SHORT: Mapping[str, str] = MappingProxyType(
    {
        "rollout": "custom.extra.rollout_matching",
        "grpo": "custom.extra.grpo",
        "vineppo": "custom.extra.vineppo",
        "distill": "custom.extra.distill",
        "environment": "custom.extra.environment",
    }
)
"""Top-level section -> the section that it stands for. Behind this module there is the long name only."""


def in_full(tree: Tree, *, origin: str) -> Tree:
    """The tree with its short sections at the keys that they stand for; ``origin`` names it in messages.

    Errors: ``ErrorList`` of ``key-duplicated`` for a section that has both names.

    >>> in_full({"grpo": {"beta": 0.1}, "training": {"seed": 1}}, origin="a.yaml")
    {'custom': {'extra': {'grpo': {'beta': 0.1}}}, 'training': {'seed': 1}}
    """
    rest = {key: value for key, value in tree.items() if key not in SHORT}
    errors: list[ConfigError] = []
    for short in [key for key in tree if key in SHORT]:
        if holds(rest, SHORT[short].split(".")):
            problem = f"{origin} writes this section again as {SHORT[short]}, which is the same one"
            remedy = "Write all its keys in one of the two."
            errors.append(ConfigError(problem, code="key-duplicated", key=short, remedy=remedy))
    if errors:
        raise ErrorList(errors)
    full: Tree = {}
    for short in [key for key in tree if key in SHORT]:
        full = merge(full, nest(SHORT[short].split("."), tree[short]))
    return merge(full, rest)


def holds(tree: Tree, names: Iterable[str]) -> bool:
    """Whether the tree has this key, by the names of the mappings above it and its own."""
    here: object = tree
    for name in names:
        if not isinstance(here, dict) or name not in here:
            return False
        here = here[name]
    return True


def value_at(tree: Tree, key: str) -> object:
    """The value of a dotted key; None where there is none."""
    given: object = tree
    for name in key.split("."):
        given = given.get(name) if isinstance(given, dict) else None
    return given


def nest(names: Iterable[str], value: object) -> Tree:
    """One value below the names, outermost first.

    >>> nest(("a", "b"), 1)
    {'a': {'b': 1}}
    """
    *above, own = names
    tree: Tree = {own: value}
    for name in reversed(above):
        tree = {name: tree}
    return tree


def read_tree(path: str | Path) -> Tree:
    """Read a file over everything it extends; the key ``extends`` itself is gone from the result.

    Paths in ``extends`` start at the directory of the file that holds them. Bases count from left to right, the
    file itself last. Two branches may share a base; a file may not be its own base.

    Errors: ``ErrorList`` of ``config-file-missing``, ``extends-cycle``, ``extends-malformed`` and of ``parse_mapping``,
    for all files at once.
    """
    errors: list[ConfigError] = []
    tree = _read(Path(path), chain=(), errors=errors)
    if errors:
        raise ErrorList({str(error): error for error in errors}.values())
    return tree


def full_key(key: str) -> str:
    """A dotted key by the long name of its section.

    >>> full_key("grpo.beta"), full_key("training.seed")
    ('custom.extra.grpo.beta', 'training.seed')
    """
    first, dot, rest = key.partition(".")
    return f"{SHORT.get(first, first)}{dot}{rest}"


def find_places(path: str | Path, *, chain: tuple[Path, ...] = ()) -> dict[str, str]:
    """Dotted key, as written -> ``file:line`` where a file of ``read_tree`` sets it; empty for what cannot be read."""
    text = None if Path(path) in chain else _text_or_none(Path(path))
    lines = lines_of(text) if text is not None else {}
    try:
        bases = (parse_mapping(text, origin=str(path)) if text is not None else {}).get(EXTENDS, [])
    except ErrorList:
        bases = []
    places: dict[str, str] = {}
    for base in [bases] if isinstance(bases, str) else bases if isinstance(bases, list) else []:
        places |= find_places(Path(path).parent / str(base), chain=(*chain, Path(path)))
    return places | {key: f"{path}:{line}" for key, line in lines.items()}


def _text_or_none(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def merge(under: Tree, over: Tree) -> Tree:
    """Lay one tree over another: mappings merge, everything else (lists, null) replaces.

    >>> merge({"a": {"b": 1, "c": [1, 2]}, "d": 5}, {"a": {"c": [3]}, "d": None})
    {'a': {'b': 1, 'c': [3]}, 'd': None}
    """
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _read(path: Path, *, chain: tuple[Path, ...], errors: list[ConfigError]) -> Tree:
    if "\0" in str(path):
        problem = f"{chain[-1] if chain else path!r}: the path {str(path)!r} holds a NUL character"
        errors.append(ConfigError(problem, code="extends-malformed", key=EXTENDS, remedy="Correct the path."))
        return {}
    resolved = path.resolve()
    if resolved in chain:
        errors.append(_cycle((*chain[chain.index(resolved) :], resolved)))
        return {}
    try:
        own = parse_mapping(_read_text(path, chain), origin=str(path))
    except ErrorList as several:
        errors += [error for error in several.errors if isinstance(error, ConfigError)]
        return {}
    tree: Tree = {}
    for base in _bases(own.pop(EXTENDS, []), path, errors):
        tree = merge(tree, _read(path.parent / base, chain=(*chain, resolved), errors=errors))
    try:
        return merge(tree, in_full(own, origin=str(path)))
    except ErrorList as several:
        errors += [error for error in several.errors if isinstance(error, ConfigError)]
        return tree


def _read_text(path: Path, chain: tuple[Path, ...]) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        if not chain:
            remedy = "Name a YAML file." if isinstance(error, OSError) else "Save it as UTF-8."
            missing = ConfigError(f"cannot be read: {reason}", code="config-file-missing", key=str(path), remedy=remedy)
        else:
            problem = f"{chain[-1]} extends {path}, which cannot be read: {reason}"
            missing = ConfigError(
                problem, code="config-file-missing", key=EXTENDS, remedy=f"Give a path relative to {chain[-1].parent}."
            )
        raise ErrorList([missing]) from error


def _bases(value: object, holder: Path, errors: list[ConfigError]) -> list[str]:
    bases = [value] if isinstance(value, str) else value
    if isinstance(bases, list) and all(isinstance(base, str) and base for base in bases):
        return bases
    problem = f"{holder}: must be a path or a list of paths, but is {value!r}"
    errors.append(
        ConfigError(
            problem, code="extends-malformed", key=EXTENDS, remedy="Write `extends: base.yaml` or a list of such paths."
        )
    )
    return []


def _cycle(loop: tuple[Path, ...]) -> ConfigError:
    names = " -> ".join(str(path) for path in loop)
    return ConfigError(
        f"the files extend each other in a circle: {names}",
        code="extends-cycle",
        key=EXTENDS,
        remedy="Break the circle.",
    )


class OverrideMalformed(ConfigError):
    """An override is not ``dotted.key=YAML value``."""

    code = "override-malformed"


def parse_overrides(overrides: Iterable[str]) -> Tree:
    """All overrides as one tree, later ones over earlier ones. Errors: ``ErrorList`` of ``OverrideMalformed``.

    >>> parse_overrides(["training.seed=7", "training.learning_rate=1e-3", "model.model=runs/a=b"])
    {'training': {'seed': 7, 'learning_rate': 0.001}, 'model': {'model': 'runs/a=b'}}
    """
    tree: Tree = {}
    errors: list[ConfigError] = []
    for override in overrides:
        try:
            tree = merge(tree, _parse(override))
        except OverrideMalformed as error:
            errors.append(error)
    if errors:
        raise ErrorList(errors)
    return tree


def _parse(override: str) -> Tree:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise OverrideMalformed(f"{override!r} has no `key=value`", key=key, remedy="Write a.b.c=value.")
    if names[0] == EXTENDS:
        raise OverrideMalformed("files are extended in YAML only", key=key, remedy="Write it into the YAML file.")
    try:
        value = parse_value(text)
    except ErrorList as several:
        problem = f"the value {text[:60]!r} is not YAML: {several.errors[0].problem}"
        raise OverrideMalformed(problem, key=key, remedy="Quote the value.") from several
    return in_full(nest(names, value), origin="--set")


def nested(keys: Mapping[str, object]) -> Tree:
    """Dotted keys as a tree; nested ones stay, short sections get their long name.

    Errors: ``ConfigError`` with ``key-not-text``, ``ErrorList`` of ``key-duplicated``.

    >>> nested({"a.b": 1, "a": {"c": 2}, "a.d.e": 3, "grpo.beta": 0.1})
    {'custom': {'extra': {'grpo': {'beta': 0.1}}}, 'a': {'b': 1, 'c': 2, 'd': {'e': 3}}}
    """
    return in_full(_undotted(keys), origin="config")


def _undotted(keys: Mapping[str, object]) -> Tree:
    tree: Tree = {}
    for key, value in keys.items():
        if not isinstance(key, str):
            raise ConfigError(f"the key {key!r} is not a text", code="key-not-text", key="config", remedy="Quote it.")
        value = str(value) if isinstance(value, Path) else value
        tree = merge(tree, nest(key.split("."), _undotted(value) if isinstance(value, Mapping) else value))
    return tree
