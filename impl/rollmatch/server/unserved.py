"""Fields of other servers' bodies that this server does not serve: accepted at their neutral values only."""

from typing import Annotated

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

_NEUTRAL: tuple[object, ...] = (None, False, 0, "", [], {})
"""Values at which these fields change nothing, such as ``stream: false``."""


def _neutral(value: object) -> None:
    if value not in _NEUTRAL:
        raise PydanticCustomError("unserved", "This server does not serve the field; leave it out")


def _neutral_factor(value: object) -> None:
    if value != 1 or value is True:
        _neutral(value)


Unserved = Annotated[None, BeforeValidator(_neutral)]
UnservedFactor = Annotated[None, BeforeValidator(_neutral_factor)]
"""1 changes nothing either: ``num_beams: 1``, ``length_penalty: 1.0``."""
