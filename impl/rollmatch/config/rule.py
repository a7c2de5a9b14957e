"""What a rule over several keys is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rollmatch.config.schema import RunConfig
from rollmatch.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule; not applied when one of the keys it reads is already known to be wrong."""

    reads: tuple[str, ...]
    check: Callable[[RunConfig], Iterator[ConfigError]]
