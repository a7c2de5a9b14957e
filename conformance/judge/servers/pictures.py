"""Small PNG files that differ in every pixel."""

import random
import struct
import zlib
from functools import cache

SIDE = 64
PROBED, CACHED, SHOWN = (7, 9, 10), 8, (5, 6)
"""Which pictures the checks of weights, of caches and of responses show: a cache of one says nothing in another."""


@cache
def picture(number: int) -> bytes:
    """RGB, 64 x 64.

    >>> picture(1)[:4], picture(1) == picture(2)
    (b'\\x89PNG', False)
    """
    draw = random.Random(number)
    rows = b"".join(b"\0" + draw.randbytes(3 * SIDE) for _ in range(SIDE))
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*one) for one in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
