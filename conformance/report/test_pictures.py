"""Images as data URLs."""

import base64
import io

import pytest
from PIL import Image

from conformance.report.runs import write_image
from rollmatch.report.scenes import LONGEST_SIDE, embed


def decoded(url):
    return base64.b64decode(url.partition(",")[2])


def test_a_small_image_is_embedded_byte_for_byte(tmp_path):
    path = write_image(tmp_path / "small.png")
    url = embed(path)
    assert url.startswith("data:image/png;base64,")
    assert decoded(url) == path.read_bytes()


@pytest.mark.parametrize(("name", "size"), [("large.png", (2000, 500)), ("small.bmp", (40, 10))])
def test_large_or_unusual_images_become_a_jpeg_of_the_same_shape(tmp_path, name, size):
    url = embed(write_image(tmp_path / name, size=size))
    assert url.startswith("data:image/jpeg;base64,")
    image = Image.open(io.BytesIO(decoded(url)))
    assert image.size == (min(LONGEST_SIDE, size[0]), min(LONGEST_SIDE // 4, size[1]))


def test_what_is_no_image_is_none(tmp_path):
    path = write_image(tmp_path / "whole.png", size=(300, 300))
    cut = tmp_path / "cut.png"
    cut.write_bytes(path.read_bytes()[:-60])
    text = tmp_path / "text.png"
    text.write_text("no image", encoding="utf-8")
    assert [embed(one) for one in (cut, text, tmp_path / "none.png", tmp_path)] == [None] * 4
    assert embed(path) is not None
