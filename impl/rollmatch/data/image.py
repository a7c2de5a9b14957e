"""Rules of image files; only their headers are read."""

import os
import stat
from collections.abc import Iterator
from functools import lru_cache

from PIL import ExifTags, Image

from rollmatch.errors import DataError

UPRIGHT = 1


class ImageMissing(DataError):
    """An image is not a file on this machine."""

    code = "image-missing"


class ImageUnreadable(DataError):
    """A file is not an image that Pillow can open."""

    code = "image-unreadable"


class ImageSizeMismatch(DataError):
    """The record's width and height are those of the stored image."""

    code = "image-size-mismatch"


class ImageTurned(DataError):
    """An image says in its EXIF data that it is to be turned, which not every reader does."""

    code = "image-turned"


def check_image(path: str, *, size: tuple[int, int] | None, key: str) -> Iterator[DataError]:
    """Broken rules of one image; ``size`` is (width, height) of the record, None when that is wrong itself."""
    try:
        found, orientation = _read_header(path)
    except FileNotFoundError:
        remedy = "Correct the path; it starts at image_root, or else at the directory of the JSONL file."
        yield ImageMissing(f"{path} does not exist", key=key, remedy=remedy)
        return
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        yield ImageUnreadable(f"{path} cannot be opened: {error}", key=key, remedy="Store it as PNG or JPEG.")
        return
    if orientation != UPRIGHT:
        problem = f"{path} is to be turned (EXIF orientation {orientation})"
        yield ImageTurned(problem, key=key, remedy="Store the turned pixels, without EXIF orientation.")
    if size is not None and found != size:
        problem = f"{path} is {found[0]} x {found[1]} pixels, but the record says {size[0]} x {size[1]}"
        yield ImageSizeMismatch(problem, key=key, remedy="Write the stored image's width and height.")


def orientation_of(image: Image.Image) -> int:
    """EXIF's number, ``UPRIGHT`` for an image that is shown as it is stored."""
    return int(image.getexif().get(ExifTags.Base.Orientation, UPRIGHT))


@lru_cache(maxsize=1024)
def _read_header(path: str) -> tuple[tuple[int, int], int]:
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
        raise OSError("it is not a regular file")
    with Image.open(path) as image:
        orientation = orientation_of(image) if "exif" in image.info else UPRIGHT
        return image.size, orientation
