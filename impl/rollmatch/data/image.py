"""Image files: their rules, which need few of their pixels, and the pixels that every side of a run gets from them.

Servers decode what they are sent in their own ways: stock vLLM puts what is transparent on white, transformers leaves
the alpha channel out. So files that are not plain RGB or grey are sent as PNG of the pixels that the learner sees.
"""

import io
import os
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from rollmatch.errors import DataError

UPRIGHT = 1
_TURNED_BY_90 = (5, 6, 7, 8)
_WITH_ORIENTATION = frozenset(("exif", "xmp", "XML:com.adobe.xmp"))
"""Where Pillow looks for it."""
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
_TAIL_BYTES = 1024
_WHOLE_ONCE_OPEN = ("WEBP",)
"""Pillow opens no part of them."""
_SENT_AS_STORED = ("PNG", "JPEG", "WEBP")
_16_BITS = 65_535


class ImageUnreadable(DataError):
    """A file is not an image that Pillow can open."""

    code = "image-unreadable"


def check_image(path: str, *, size: tuple[int, int] | None, key: str) -> Iterator[DataError]:
    """Broken rules of one image; ``size`` is (width, height) of the record, None when that is wrong itself."""
    try:
        found, orientation = read_header(path)
    except FileNotFoundError:
        remedy = "Correct the path; it starts at image_root, or else at the directory of the JSONL file."
        yield DataError(f"{path} does not exist", code="image-missing", key=key, remedy=remedy)
        return
    except ImageUnreadable as error:
        yield ImageUnreadable(error.problem, key=key, remedy=error.remedy)
        return
    if orientation != UPRIGHT:
        problem = f"{path} is to be turned (EXIF orientation {orientation})"
        yield DataError(
            problem, code="image-turned", key=key, remedy="Store the turned pixels, without EXIF orientation."
        )
    if size is not None and found != size:
        problem = f"{path} is {found[0]} x {found[1]} pixels, but the record says {size[0]} x {size[1]}"
        yield DataError(
            problem, code="image-size-mismatch", key=key, remedy="Write the stored image's width and height."
        )


def orientation_of(image: Image.Image) -> int:
    """EXIF's number, ``UPRIGHT`` for an image that is shown as it is stored."""
    return int(image.getexif().get(ExifTags.Base.Orientation, UPRIGHT))


def check_regular(path: str | Path) -> None:
    """Opening a pipe would wait for its writer, and a device has no end. Errors: ``OSError``."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is not a regular file")


@lru_cache(maxsize=1024)
def read_header(path: str) -> tuple[tuple[int, int], int]:
    """(width, height) as stored, and EXIF's orientation; a file that may be cut off is decoded.

    Errors: ``FileNotFoundError``, ``ImageUnreadable``.
    """
    try:
        check_regular(path)
        with Image.open(path) as image:
            has_orientation = not _WITH_ORIENTATION.isdisjoint(image.info)
            orientation = orientation_of(image) if has_orientation else UPRIGHT
            size = image.size
            if image.format not in _WHOLE_ONCE_OPEN and _lacks_end(path, image.format):
                image.load()
            _check_mode(image)
            return size, orientation
    except FileNotFoundError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever damaged bytes make them
        raise unreadable(path, error) from error


def upright_size(path: str | Path) -> tuple[int, int]:
    """(width, height) once it is turned as EXIF says. Errors: ``ImageUnreadable``, also where there is no file."""
    try:
        (width, height), orientation = read_header(str(path))
    except FileNotFoundError as error:
        raise unreadable(path, error) from error
    return (height, width) if orientation in _TURNED_BY_90 else (width, height)


def unreadable(path: str | Path, error: Exception, *, key: str = "") -> ImageUnreadable:
    """The error about a file that cannot be opened or decoded."""
    problem = f"{path} cannot be opened: {why_unreadable(error)}"
    return ImageUnreadable(problem, key=key or str(path), remedy="Store it as PNG or JPEG.")


def why_unreadable(error: Exception) -> str:
    """In words; Pillow names an object's address for bytes that it does not know."""
    if isinstance(error, UnidentifiedImageError):
        return "it is no image that Pillow knows"
    named = error.strerror if isinstance(error, OSError) else None  # str() would name the path again
    return named or str(error) or type(error).__name__


def rgb_of(image: Image.Image) -> Image.Image:
    """The pixels in RGB as every backend gets them: no alpha channel, 16 bits as 8, the first of several frames.

    Errors: ``ValueError`` for 32 bits, whose white nobody knows; those of Pillow's decoders.
    """
    _check_mode(image)
    if _has_16_bits(image):
        grey = np.asarray(image).astype(np.uint32) * 255 + _16_BITS // 2
        image = Image.fromarray((grey // _16_BITS).astype(np.uint8))
    plain = image.copy()
    plain.info = {}  # else a color that counts as transparent is kept, and saved with it
    return plain.convert("RGB")


def sent_bytes(path: str | Path) -> bytes:
    """A file whose pixels are those of ``rgb_of`` for every reader: the stored one, or a PNG.

    Errors: those of ``rgb_of``.
    """
    with Image.open(path) as image:
        is_plain = image.mode in ("RGB", "L") and "transparency" not in image.info
        if is_plain and image.format in _SENT_AS_STORED and not getattr(image, "is_animated", False):
            return Path(path).read_bytes()
        return as_png(image)


def as_png(image: Image.Image) -> bytes:
    """PNG of ``rgb_of``."""
    encoded = io.BytesIO()
    rgb_of(image).save(encoded, format="PNG", compress_level=1)
    return encoded.getvalue()


def _has_16_bits(image: Image.Image) -> bool:
    """Pillow has 16 bits of some formats in 32."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _check_mode(image: Image.Image) -> None:
    if image.mode in ("I", "F") and not _has_16_bits(image):
        raise ValueError("it has 32 bits per pixel, of which nobody knows which are white")


def _lacks_end(path: str, kind: str | None) -> bool:
    end = _ENDS.get(kind or "")
    if end is None:
        return True
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return end not in file.read()
