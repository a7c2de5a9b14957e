"""``a.b=value`` from the command line, as one more layer over the YAML."""

from collections.abc import Iterable

import yaml

from rollmatch.config.extends import EXTENDS, merge
from rollmatch.config.yaml_dialect import Tree, parse_value
from rollmatch.errors import ConfigError, ErrorList


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
    except yaml.YAMLError as error:
        problem = f"the value {text!r} is not YAML: {' '.join(str(error).split())}"
        raise OverrideMalformed(problem, key=key, remedy="Quote the value.") from error
    for name in reversed(names):
        value = {name: value}
    tree: Tree = value
    return tree
