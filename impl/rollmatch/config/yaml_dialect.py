"""YAML text -> plain tree, by the YAML 1.2 core rules that editors follow, and back.

PyYAML alone follows YAML 1.1, where ``1e-5`` is a text, ``010`` is eight and ``no`` is false.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from rollmatch.errors import ConfigError, ErrorList

Tree = dict[str, Any]
"""What a YAML mapping holds: nested dicts, lists and scalars."""

_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
)

_TAGS_OF_KEYS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


class Yaml12Loader(yaml.SafeLoader):
    """Knows the types of YAML 1.2 and no others."""


class _Yaml12Dumper(yaml.SafeDumper):
    """Quotes what either YAML version would read as something else than text."""


Yaml12Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _RESOLVERS:
    for _side in (Yaml12Loader, _Yaml12Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first)


def parse_value(text: str) -> Any:
    """One YAML value, as on the right of ``key:``. Errors: ``yaml.YAMLError``.

    >>> parse_value("1e-5"), parse_value("yes"), parse_value("{a: [1, null]}")
    (1e-05, 'yes', {'a': [1, None]})
    """
    return yaml.load(text, Loader=Yaml12Loader)


def parse_mapping(text: str, *, origin: str) -> Tree:
    """A YAML document that is a mapping; ``origin`` names it in messages.

    Errors: ``ErrorList`` of ``yaml-malformed``, ``not-a-mapping``, ``key-duplicated``, ``key-not-text``.
    """
    try:
        return _construct(text, origin)
    except yaml.YAMLError as error:
        remedy = "Correct the YAML at that place."
        raise ErrorList(
            [ConfigError(" ".join(str(error).split()), code="yaml-malformed", key=origin, remedy=remedy)]
        ) from error


def dump(tree: Tree) -> str:
    """A tree as YAML text, keys in their order; ``parse_mapping`` reads it back equal."""
    text = yaml.dump(tree, Dumper=_Yaml12Dumper, sort_keys=False, allow_unicode=True, width=120)
    return str(text)


def _construct(text: str, origin: str) -> Tree:
    loader = Yaml12Loader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ErrorList([_not_a_mapping(node, origin)])
        if errors := KeyCheck(origin).errors_below(node):
            raise ErrorList(errors)
        tree: Tree = loader.construct_document(node)
        return tree
    finally:
        loader.dispose()


def _not_a_mapping(node: yaml.Node | None, origin: str) -> ConfigError:
    found = "is empty" if node is None else "holds something else at its top level"
    return ConfigError(f"the file {found}", code="not-a-mapping", key=origin, remedy="Write `key: value` lines.")


class KeyCheck:
    """Judges the keys of a document before YAML merges and overwrites them."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.judged: set[int] = set()
        """Nodes seen, so that many aliases of one node cost nothing."""

    def errors_below(
        self, node: yaml.Node, path: tuple[str, ...] = (), above: tuple[int, ...] = ()
    ) -> list[ConfigError]:
        if id(node) in above:
            problem = f"{self.origin}: an alias contains itself"
            return [ConfigError(problem, code="yaml-malformed", key=".".join(path), remedy="Remove the alias.")]
        if id(node) in self.judged or isinstance(node, yaml.ScalarNode):
            return []
        self.judged.add(id(node))
        errors = list(self._errors_of_keys(node, path)) if isinstance(node, yaml.MappingNode) else []
        for name, child in _children(node):
            errors += self.errors_below(child, (*path, name), (*above, id(node)))
        return errors

    def _errors_of_keys(self, node: yaml.MappingNode, path: tuple[str, ...]) -> Iterator[ConfigError]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            dotted, line = ".".join((*path, str(key.value))), key.start_mark.line + 1
            if key.tag not in _TAGS_OF_KEYS:
                problem = f"the key in {self.origin}, line {line}, is not a text"
                yield ConfigError(problem, code="key-not-text", key=dotted, remedy="Put it in quotes.")
            elif key.value in lines:
                problem = f"{self.origin} holds this key in line {lines[key.value]} and again in line {line}"
                yield ConfigError(problem, code="key-duplicated", key=dotted, remedy="Keep one of the two.")
            else:
                lines[key.value] = line


def _children(node: yaml.Node) -> list[tuple[str, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        return [(str(key.value), value) for key, value in node.value]
    return [(str(place), item) for place, item in enumerate(node.value)]
