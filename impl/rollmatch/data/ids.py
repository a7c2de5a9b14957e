"""Token ids as they travel: little-endian int32 bytes. Needs no torch."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

_ID = np.dtype("<i4")


def pack_ids(ids: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """Ids -> 4 bytes each.

    >>> pack_ids([1, 256])
    b'\\x01\\x00\\x00\\x00\\x00\\x01\\x00\\x00'
    """
    return np.asarray(ids, dtype=_ID).tobytes()


def unpack_ids(packed: bytes) -> NDArray[np.int32]:
    """Bytes -> [n] ids, without a copy.

    >>> unpack_ids(pack_ids([5, 9])).tolist()
    [5, 9]
    """
    return np.frombuffer(packed, dtype=_ID)


def _from_list(value: object) -> object:
    """A plain list of ids (as JSON has it, where 3.0 is 3) as bytes; whole ids only."""
    if isinstance(value, bytes):
        if len(value) % _ID.itemsize:
            raise PydanticCustomError("ids", "Input should hold 4 bytes per id")
        return value
    if not isinstance(value, list | tuple) or not all(map(_is_whole, value)):
        raise PydanticCustomError("ids", "Input should be a list of token ids")
    if any(not 0 <= item < 2**31 for item in value):
        raise PydanticCustomError("ids", "Input should hold ids from 0 to 2147483647")
    return pack_ids(value)


def _is_whole(item: object) -> bool:
    """By JSON Schema.

    >>> [_is_whole(item) for item in (3, 3.0, 3.5, True, "3")]
    [True, True, False, False, False]
    """
    return type(item) is int or (type(item) is float and item.is_integer())


PackedIds = Annotated[
    bytes, BeforeValidator(_from_list, json_schema_input_type=list[Annotated[int, Field(ge=0, lt=2**31)]])
]
"""Ids of one sequence as int32 bytes; a list of ids is taken, too."""
