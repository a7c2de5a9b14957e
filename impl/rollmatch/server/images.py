"""Images as callers send them, decoded to RGB; paths only below the directories that the operator named."""

import asyncio
import base64
import binascii
import gc
import io
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from PIL import Image

from rollmatch.config.limits import LimitsConfig
from rollmatch.data.image import rgb_of, why_unreadable
from rollmatch.server.failures import Refusal
from rollmatch.server.remote_images import SCHEMES, fetch_image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""Pillow's decoders that are used; the others see no foreign byte."""
_BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "Qk", "UklGR")
"""Of the files of ``FORMATS``."""
_LONGEST_PATH = 4096
_DOWNLOADING_CALLS = 16
"""Calls that wait for downloads at the same time; the next ones wait for these."""
_COLLECT_EVERY_S = 1.0
_T = TypeVar("_T")


@dataclass(slots=True)
class PixelBudget:
    """Images and pixels that one call may still have, and what has been decoded of them."""

    images_left: int
    left: int
    bytes_left: int
    """Of downloads."""
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
        self._downloading = ThreadPoolExecutor(_DOWNLOADING_CALLS, thread_name_prefix="downloads")
        self._pixels = 0
        """Of all decoded images that are in memory."""
        self._lock = threading.RLock()  # a collection may release an image wherever it begins
        self._collected_at = 0.0

    def budget(self) -> PixelBudget:
        """A new call's."""
        limits = self.limits
        return PixelBudget(limits.max_images_per_call, limits.max_pixels_per_call, limits.max_body_bytes)

    async def beside(self, may_download: bool, work: Callable[..., _T], *arguments: object) -> _T:
        """Run work that reads images in a thread; downloads have threads of their own, so that they delay no others."""
        executor = self._downloading if may_download and self.domains else None
        return await asyncio.get_running_loop().run_in_executor(executor, partial(work, *arguments))

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

    def count_images(self, num: int, budget: PixelBudget, *, item: int, key: str) -> None:
        """Count a prompt's images, those of its messages too, before one is read. Errors: ``Refusal``."""
        budget.images_left -= num
        if budget.images_left < 0:
            problem = f"brings the call above {self.limits.max_images_per_call} images"
            remedy = "Split the call, or raise custom.extra.rollout_server.limits.max_images_per_call."
            raise Refusal(problem, code="call-too-large", key=key, remedy=remedy, item=item)

    def _decode(self, value: str | bytes, budget: PixelBudget, *, item: int, key: str) -> Image.Image:
        encoded = self._bytes_of(value, budget, item=item, key=key)
        try:
            with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
                pixels = image.width * image.height
                self._count(pixels, budget, item=item, key=key)
                with self._held(pixels, item=item, key=key) as hold:
                    return hold(rgb_of(image))
        except Refusal:
            raise
        except Image.DecompressionBombError as error:  # Pillow's own limit, found in the header
            raise Refusal(
                str(error), code="image-too-large", key=key, remedy="Send smaller images.", item=item
            ) from error
        except Exception as error:  # Pillow's decoders raise whatever damaged bytes make them
            raise _unreadable(why_unreadable(error), item=item, key=key) from error

    @contextmanager
    def _held(self, pixels: int, *, item: int, key: str) -> Iterator[Callable[[Image.Image], Image.Image]]:
        """Count pixels from before they are decoded until nobody has the image any more. Errors: ``Refusal``."""
        limit, held = self.limits.max_decoded_pixels, False
        with self._lock:
            if self._pixels + pixels > limit and time.monotonic() > self._collected_at + _COLLECT_EVERY_S:
                gc.collect()  # an error keeps what its frames hold, in a circle, and a server collects seldom
                self._collected_at = time.monotonic()
            if self._pixels + pixels > limit:
                problem = f"the images of all calls have {self._pixels} pixels, and this one {pixels}"
                remedy = "Try again later, or raise custom.extra.rollout_server.limits.max_decoded_pixels."
                raise Refusal(problem, code="server-busy", key=key, remedy=remedy, item=item)
            self._pixels += pixels

        def hold(image: Image.Image) -> Image.Image:
            nonlocal held
            weakref.finalize(image, self._release, pixels)
            held = True
            return image

        try:
            yield hold
        finally:
            if not held:
                self._release(pixels)

    def _release(self, pixels: int) -> None:
        with self._lock:
            self._pixels -= pixels

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

    def _bytes_of(self, value: str | bytes, budget: PixelBudget, *, item: int, key: str) -> bytes:
        if isinstance(value, bytes):
            return value
        if value.lower().startswith(SCHEMES):
            fetched = fetch_image(value, self.domains, max_bytes=budget.bytes_left, item=item, key=key)
            budget.bytes_left -= len(fetched)
            return fetched
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
        try:
            path = Path(value).resolve()
        except RuntimeError as error:  # links that lead in a circle, up to Python 3.12
            raise OSError(str(error)) from error
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
