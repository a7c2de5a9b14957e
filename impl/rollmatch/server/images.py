"""Images as callers send them -> RGB; paths only from where the operator allows."""

import base64
import binascii
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from rollmatch.server.failures import BadItem

_LONGEST_PATH = 4096


class ImagePathOutsideRoots(BadItem):
    """An image path lies below a directory that the operator named."""

    code = "image-path-outside-roots"
    status = 403


class ImageUnreadable(BadItem):
    """An image is what it says, and can be decoded."""

    code = "image-unreadable"


class ImageUrlRefused(BadItem):
    """The server fetches nothing: images come along, or lie below a root."""

    code = "image-url-refused"


class ImageReader:
    """Reads images for one server."""

    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = tuple(Path(root).resolve() for root in roots)

    def read(self, value: str | bytes, *, item: int, key: str) -> Image.Image:
        """A path, a ``file://`` or data URL, base64 text or encoded bytes.

        Errors: ``ImagePathOutsideRoots``, ``ImageUnreadable``, ``ImageUrlRefused``.
        """
        try:
            return _decode(self._bytes_of(value, item=item, key=key))
        except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
            told = "a path" if isinstance(value, str) and _looks_like_path(value) else "data"
            raise ImageUnreadable(f"cannot read the image ({told}): {error}", key=key, item=item) from error

    def _bytes_of(self, value: str | bytes, *, item: int, key: str) -> bytes:
        if isinstance(value, bytes):
            return value
        if value.startswith(("http://", "https://", "ftp://")):
            remedy = "Send a data URL, base64 text, or a path below an image root."
            raise ImageUrlRefused("remote images are not fetched", key=key, remedy=remedy, item=item)
        if value.startswith("data:"):
            return _from_base64(value.partition(",")[2])
        if _looks_like_path(value):
            return self._allowed(value.removeprefix("file://"), item=item, key=key).read_bytes()
        return _from_base64(value)

    def _allowed(self, value: str, *, item: int, key: str) -> Path:
        """The path with every link and ``..`` resolved."""
        path = Path(value).resolve()
        if not any(path.is_relative_to(root) for root in self.roots):
            told = ", ".join(map(str, self.roots)) or "none is set"
            raise ImagePathOutsideRoots(
                f"{value} is below no image root ({told})",
                key=key,
                remedy="Start the server with the images' directory as an image root, or send the image itself.",
                item=item,
            )
        return path


def _looks_like_path(value: str) -> bool:
    """Base64 text has no dot, and JPEGs in base64 begin with a slash.

    >>> _looks_like_path("/data/a.png"), _looks_like_path("/9j/4AAQSkZJRgABAQ=="), _looks_like_path("/data/scenes/a_b")
    (True, False, True)
    """
    if len(value) > _LONGEST_PATH:
        return False
    if value.startswith("file://") or "." in value:
        return True
    try:
        _decode(_from_base64(value))
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError):
        return not _is_base64_of_image(value)
    return False


def _is_base64_of_image(value: str) -> bool:
    """Whether it begins as PNG, JPEG, GIF, BMP or WebP files do; then it is a damaged image and no path."""
    return value.startswith(("iVBORw0KGgo", "/9j/", "R0lGOD", "Qk", "UklGR"))


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("neither a path nor base64") from error


def _decode(encoded: bytes) -> Image.Image:
    with Image.open(io.BytesIO(encoded)) as image:
        return image.convert("RGB")
