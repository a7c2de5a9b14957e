"""YAML text -> plain tree, by the YAML 1.2 core rules that editors follow, and back.

PyYAML alone follows YAML 1.1, where ``1e-5`` is a text, ``010`` is eight and ``no`` is false.
"""

import re
from collections.abc import Iterator
from itertools import islice

import yaml

from rollmatch.errors import ConfigError, ErrorList

Tree = dict[str, object]
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

_CORE = "tag:yaml.org,2002:"
_TAGS_OF_KEYS = (f"{_CORE}str", f"{_CORE}merge")
_TAGS_OF_COLLECTIONS = (f"{_CORE}map", f"{_CORE}seq")
_PATTERNS = {name: re.compile(f"^(?:{pattern})$") for name, pattern, _ in _RESOLVERS}
MAX_DEPTH = 50
MAX_VALUES = 100_000
"""Values of a document with all aliases expanded: nine aliases of nine aliases ... would fill the memory."""
MAX_DIGITS = 400
MAX_SHOWN = 60


class Yaml12Loader(yaml.SafeLoader):
    """Knows the types of YAML 1.2 and no others."""


class _Yaml12Dumper(yaml.SafeDumper):
    """Quotes what either YAML version would read as something else than text."""


Yaml12Loader.yaml_implicit_resolvers = {}
for _name, _, _first in _RESOLVERS:
    for _side in (Yaml12Loader, _Yaml12Dumper):
        _side.add_implicit_resolver(f"{_CORE}{_name}", _PATTERNS[_name], _first)


def parse_value(text: str) -> object:
    """One YAML value, as on the right of ``key:``. Errors: ``ErrorList`` of ``yaml-malformed`` and others.

    >>> parse_value("1e-5"), parse_value("yes"), parse_value("{a: [1, null]}")
    (1e-05, 'yes', {'a': [1, None]})
    """
    return _construct(text, "the value")


def parse_mapping(text: str, *, origin: str) -> Tree:
    """A YAML document that is a mapping; ``origin`` names it in messages.

    Errors: ``ErrorList`` of ``yaml-malformed``, ``not-a-mapping``, ``key-duplicated``, ``key-not-text``.
    """
    tree = _construct(text, origin)
    if not isinstance(tree, dict):
        found = "is empty" if tree is None else "holds something else at its top level"
        remedy = "Write `key: value` lines."
        raise ErrorList([ConfigError(f"the file {found}", code="not-a-mapping", key=origin, remedy=remedy)])
    return tree


def lines_of(text: str) -> dict[str, int]:
    """Dotted key -> its line, from 1, as far as the document is right.

    >>> lines_of("training:\\n  seed: 1\\n")
    {'training': 1, 'training.seed': 2}
    """
    try:
        node = yaml.compose(text, Loader=Yaml12Loader)
    except (yaml.YAMLError, RecursionError):
        return {}
    return dict(islice(_lines_below(node, ()), MAX_VALUES)) if isinstance(node, yaml.MappingNode) else {}


def _lines_below(node: yaml.MappingNode, path: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for key, value in node.value if len(path) < MAX_DEPTH else ():
        names = (*path, str(key.value))
        yield ".".join(names), key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines_below(value, names)


def dump(tree: Tree) -> str:
    """A tree as YAML text, keys in their order; ``parse_mapping`` reads it back equal."""
    text = yaml.dump(tree, Dumper=_Yaml12Dumper, sort_keys=False, allow_unicode=True, width=120)
    return str(text)


def _construct(text: str, origin: str) -> object:
    try:
        loader = Yaml12Loader(text)
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ErrorList([_malformed(" ".join(str(error).split()), key=origin)]) from error
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if errors := NodeCheck(origin).errors_below(node):
            raise ErrorList(errors)
        tree: object = loader.construct_document(node)
        return tree
    except yaml.YAMLError as error:
        raise ErrorList([_malformed(" ".join(str(error).split()), key=origin)]) from error
    except RecursionError as error:
        raise ErrorList([_malformed("values are nested too deeply", key=origin)]) from error
    finally:
        loader.dispose()


def _malformed(problem: str, *, key: str, remedy: str = "Correct the YAML at that place.") -> ConfigError:
    return ConfigError(problem, code="yaml-malformed", key=key, remedy=remedy)


class NodeCheck:
    """Check a document before YAML merges and overwrites keys, expands aliases and converts values."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.sizes: dict[int, int] = {}
        """Node -> number of values below it with all aliases expanded; each node is looked at once."""

    def errors_below(
        self, node: yaml.Node, path: tuple[str, ...] = (), above: tuple[int, ...] = ()
    ) -> list[ConfigError]:
        """All errors of a node and of the nodes below it."""
        place = ".".join(path) or self.origin
        if id(node) in above:
            return [_malformed(f"{self.origin}: an alias contains itself", key=place, remedy="Remove the alias.")]
        if len(path) > MAX_DEPTH:
            problem = f"{self.origin}: values are nested deeper than {MAX_DEPTH} levels"
            return [_malformed(problem, key=".".join(path[:3]), remedy="Remove some levels.")]
        if id(node) in self.sizes:
            return []
        self.sizes[id(node)] = 1
        if isinstance(node, yaml.ScalarNode):
            return [_malformed(problem, key=place) for problem in self._problems_of_scalar(node)]
        errors = list(self._errors_of_keys(node, path)) if isinstance(node, yaml.MappingNode) else []
        if node.tag not in _TAGS_OF_COLLECTIONS:
            errors.append(_malformed(f"{self._line(node)}: the tag {node.tag} is not supported", key=place))
        for name, child in _children(node):
            errors += self.errors_below(child, (*path, name), (*above, id(node)))
        sizes = [self.sizes.get(id(child), 1) for _, child in _children(node)]
        self.sizes[id(node)] += sum(sizes)
        if sum(sizes) > MAX_VALUES >= max(sizes):  # named once, at the smallest such node
            problem = f"{self.origin}: with all aliases expanded it holds more than {MAX_VALUES} values"
            errors.append(_malformed(problem, key=place, remedy="Remove aliases of aliases."))
        return errors

    def _problems_of_scalar(self, node: yaml.ScalarNode) -> Iterator[str]:
        kind = node.tag.rpartition(":")[2]
        if not node.tag.startswith(_CORE) or kind not in (*_PATTERNS, "str"):
            yield f"{self._line(node)}: the tag {node.tag} is not supported"
        elif kind != "str" and not _PATTERNS[kind].match(node.value):
            yield f"{self._line(node)}: {node.value[:MAX_SHOWN]!r} is not of type {kind}"
        elif kind in ("int", "float") and len(node.value) > MAX_DIGITS:
            yield f"{self._line(node)}: a number of {len(node.value)} digits"

    def _line(self, node: yaml.Node) -> str:
        return f"{self.origin}, line {node.start_mark.line + 1}"

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
