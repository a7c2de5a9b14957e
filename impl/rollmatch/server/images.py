"""Images as callers send them, decoded to RGB; paths only below the directories that the operator named."""

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from rollmatch.config.limits import LimitsConfig
from rollmatch.data.image import rgb_of
from rollmatch.server.failures import Refusal
from rollmatch.server.remote_images import SCHEMES, fetch_image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""Pillow's decoders that are used; the others see no foreign byte."""
_BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "Qk", "UklGR")
"""Of the files of ``FORMATS``."""
_LONGEST_PATH = 4096


@dataclass(slots=True)
class PixelBudget:
    """Pixels that the images of one call may still have together, and what has been decoded of them."""

    left: int
    decoded: dict[str | bytes, Image.Image] = field(default_factory=dict)
    """The responses of a group share their images: each is decoded once, and counted as often as it is used."""


class ImageReader:
    """Reads the images of one server's calls."""

    def __init__(
        self, roots: Sequence[str], limits: LimitsConfig | None = None, *, domains: Sequence[str] = ()
    ) -> None:
        """``domains``: hosts from which images are fetched by URL."""
        self.roots, self.domains = tuple(Path(root).resolve() for root in roots), tuple(domains)
        self.limits = limits or LimitsConfig()

    def budget(self) -> PixelBudget:
        """A new call's."""
        return PixelBudget(self.limits.max_pixels_per_call)

    def read(self, value: str | bytes, budget: PixelBudget, *, item: int, key: str) -> Image.Image:
        """Decode a path, a ``file://``, data or allowed URL, base64 text or encoded bytes; once per call.

        Pixels are counted before any is decoded. Errors: ``Refusal`` with one of the ``image-`` codes.
        """
        known = budget.decoded.get(value)
        if known is not None:
            self._count(known.width * known.height, budget, item=item, key=key)
            return known
        budget.decoded[value] = self._decode(value, budget, item=item, key=key)
        return budget.decoded[value]

    def _decode(self, value: str | bytes, budget: PixelBudget, *, item: int, key: str) -> Image.Image:
        encoded = self._bytes_of(value, item=item, key=key)
        try:
            with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
                self._count(image.width * image.height, budget, item=item, key=key)
                return rgb_of(image)
        except Refusal:
            raise
        except Image.DecompressionBombError as error:  # Pillow's own limit, found in the header
            raise Refusal(
                str(error), code="image-too-large", key=key, remedy="Send smaller images.", item=item
            ) from error
        except Exception as error:  # Pillow's decoders raise whatever damaged bytes make them
            raise _unreadable(f"{type(error).__name__}: {error}", item=item, key=key) from error

    def _count(self, pixels: int, budget: PixelBudget, *, item: int, key: str) -> None:
        if pixels > self.limits.max_pixels_per_image:
            problem, limit = f"has {pixels} pixels", "max_pixels_per_image"
        elif pixels > budget.left:
            problem, limit = (
                f"brings the call's images above {self.limits.max_pixels_per_call} pixels",
                "max_pixels_per_call",
            )
        else:
            budget.left -= pixels
            return
        remedy = f"Send smaller images, or raise custom.extra.rollout_server.limits.{limit}."
        raise Refusal(problem, code="image-too-large", key=key, remedy=remedy, item=item)

    def _bytes_of(self, value: str | bytes, *, item: int, key: str) -> bytes:
        if isinstance(value, bytes):
            return value
        if value.lower().startswith(SCHEMES):
            return fetch_image(value, self.domains, max_bytes=self.limits.max_body_bytes, item=item, key=key)
        try:
            if not value.startswith("data:") and looks_like_path(value):
                return self._read_file(self._allowed(value.removeprefix("file://"), item=item, key=key))
            text = value.partition(",")[2] if value.startswith("data:") else value
            return base64.b64decode("".join(text.split()), validate=True)
        except (OSError, ValueError, binascii.Error) as error:
            raise _unreadable(f"is neither a path nor base64: {error}", item=item, key=key) from error

    def _read_file(self, path: Path) -> bytes:
        """The bytes of a regular file that is no longer than a body may be. Errors: ``OSError``."""
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file")
        if path.stat().st_size > self.limits.max_body_bytes:
            raise OSError(f"{path} has more than {self.limits.max_body_bytes} bytes")
        return path.read_bytes()

    def _allowed(self, value: str, *, item: int, key: str) -> Path:
        """The path with every link and ``..`` resolved."""
        path = Path(value).resolve()
        if not any(path.is_relative_to(root) for root in self.roots):
            roots = ", ".join(map(str, self.roots)) or "none is set"
            remedy = "Start the server with the images' directory as an image root, or send the image itself."
            problem = f"is below no image root ({roots})"
            raise Refusal(problem, code="image-path-outside-roots", key=key, remedy=remedy, item=item)
        return path


def looks_like_path(value: str) -> bool:
    """Whether a text names a file: base64 has no dot, and an image in base64 begins as one of ``FORMATS``.

    >>> looks_like_path("/data/a.png"), looks_like_path("/9j/4AAQSkZJRgABAQ=="), looks_like_path("/data/scenes/a_b")
    (True, False, True)
    """
    if len(value) > _LONGEST_PATH:
        return False
    return value.startswith("file://") or "." in value or not value.startswith(_BASE64_BEGINNINGS)


def _unreadable(problem: str, *, item: int, key: str) -> Refusal:
    remedy = f"Send a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file."
    return Refusal(problem, code="image-unreadable", key=key, remedy=remedy, item=item)
