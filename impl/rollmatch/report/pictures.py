"""Images as data URLs, so that the page needs no other file."""

import base64
import io
from pathlib import Path

from PIL import Image

LONGEST_SIDE = 640
"""Larger images are scaled down to this many pixels: their boxes stay where they are, in relative terms."""
FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
MAX_BYTES = 100_000


def embed(path: Path) -> str | None:
    """A ``data:`` URL; None where there is no such file or it is no image, which the page says in its place."""
    try:
        raw = path.read_bytes()
        with Image.open(io.BytesIO(raw)) as image:
            image.load()  # a truncated file is found out here, not by the browser
            if image.format in FORMATS and len(raw) <= MAX_BYTES and max(image.size) <= LONGEST_SIDE:
                return _data_url(raw, FORMATS[image.format])
            image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            smaller = io.BytesIO()
            image.convert("RGB").save(smaller, format="JPEG", quality=85)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return _data_url(smaller.getvalue(), "image/jpeg")


def _data_url(raw: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(raw).decode('ascii')}"
