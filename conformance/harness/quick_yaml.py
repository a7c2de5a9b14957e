"""Our own lists, read ten times as fast: by libyaml, where PyYAML was built with it.

It takes a tab at the end of a line, and a few more oddities that rollmatch refuses in the files of others.
"""

from typing import Any

import yaml

from rollmatch.config.yaml_dialect import KeyCheck, Yaml12Loader, parse_mapping


class QuickLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Knows the same types."""

    yaml_implicit_resolvers = Yaml12Loader.yaml_implicit_resolvers


def parse_own(text: str, *, origin: str) -> dict[str, Any]:
    """As ``parse_mapping``, which also says what is wrong where something is."""
    return _parsed(text, origin) or parse_mapping(text, origin=origin)


def _parsed(text: str, origin: str) -> dict[str, Any]:
    """Empty where ``parse_mapping`` might find something wrong."""
    loader = QuickLoader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode) or KeyCheck(origin).errors_below(node):
            return {}
        return dict(loader.construct_document(node))
    except yaml.YAMLError:
        return {}
    finally:
        loader.dispose()
