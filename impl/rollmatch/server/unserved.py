"""Fields of other servers' bodies that this server does not serve: accepted at their neutral values only."""

from typing import Annotated

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

_NEUTRAL = (None, False, 0, 1, 1.0, "")
"""Values at which the fields change nothing: ``num_beams: 1``, ``stream: false``, ``length_penalty: 1.0``, ..."""


def _neutral(value: object) -> None:
    if value in ([], {}) or (isinstance(value, bool | int | float | str | None) and value in _NEUTRAL):
        return
    raise PydanticCustomError("unserved", "This server does not serve the field; leave it out")


Unserved = Annotated[None, BeforeValidator(_neutral)]
