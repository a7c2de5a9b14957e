"""Pixels of image files: every side of a run gets the same ones, whatever a reader does with transparency."""

import io

import numpy as np
import pytest
from PIL import Image

from rollmatch.data.image import as_png, read_header, rgb_of, sent_bytes

RAMP = np.linspace(0, 65535, 256 * 4).round().astype(np.uint16).reshape(4, 256)
COLOR = np.random.default_rng(0).integers(0, 256, (4, 256, 4), dtype=np.uint8)


def palette(**saved):
    image = Image.fromarray(COLOR[..., :3]).quantize(8)
    return image, saved


FILES = {
    "grey16.png": (Image.fromarray(RAMP), {}),
    "grey16.tif": (Image.fromarray(RAMP), {}),
    "rgba.png": (Image.fromarray(COLOR), {}),
    "rgba.webp": (Image.fromarray(COLOR), {"lossless": True, "exact": True}),
    "la.png": (Image.fromarray(COLOR[..., :2].copy(), "LA"), {}),
    "palette.png": palette(transparency=bytes(range(0, 256, 32))),
    "key.png": (Image.fromarray(COLOR[..., :3]), {"transparency": tuple(map(int, COLOR[0, 0, :3]))}),
    "cmyk.jpg": (Image.fromarray(COLOR, "CMYK"), {}),
    "bits.png": (Image.fromarray(COLOR[..., 0]).convert("1"), {}),
    "frames.gif": (palette()[0], {"save_all": True, "append_images": [Image.new("P", (256, 4))], "transparency": 0}),
    "frames.png": (Image.fromarray(COLOR), {"save_all": True, "append_images": [Image.new("RGBA", (256, 4))]}),
    "rgb.jpg": (Image.fromarray(COLOR[..., :3]), {}),
    "rgb.png": (Image.fromarray(COLOR[..., :3]), {}),
    "grey.png": (Image.fromarray(COLOR[..., 0]), {}),
}
AS_STORED = ("rgb.jpg", "rgb.png", "grey.png")


@pytest.fixture(params=FILES)
def path(request, tmp_path):
    image, saved = FILES[request.param]
    image.save(tmp_path / request.param, **saved)
    return tmp_path / request.param


def without_alpha(encoded):
    """As transformers and ms-swift do."""
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


def on_white(encoded):
    """As vLLM does."""
    image = Image.open(io.BytesIO(encoded)).convert("RGBA")
    return np.asarray(Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB"))


@pytest.mark.scenario(clauses=["rollout-backends/a-request-holds-the-prompt-and-nothing-of-the-answer#5"])
def test_what_is_sent_is_what_the_learner_sees_for_every_reader(path):
    with Image.open(path) as image:
        seen = np.asarray(rgb_of(image))
    for read in (without_alpha, on_white):
        np.testing.assert_array_equal(read(sent_bytes(path)), seen)
    with Image.open(path) as image:
        np.testing.assert_array_equal(on_white(as_png(image)), seen)
    assert (sent_bytes(path) == path.read_bytes()) == (path.name in AS_STORED), "photos travel as they are stored"


@pytest.mark.parametrize("name", ["grey16.png", "grey16.tif"])
def test_16_bits_become_8(tmp_path, name):
    FILES[name][0].save(tmp_path / name)
    with Image.open(tmp_path / name) as image:
        found = np.asarray(rgb_of(image)).astype(float)
    np.testing.assert_allclose(found, np.repeat(RAMP[..., None] / 257.0, 3, axis=2), atol=0.5)


def test_colors_of_transparent_pixels_are_kept(tmp_path):
    with Image.open(io.BytesIO(as_png(Image.fromarray(COLOR)))) as image:
        np.testing.assert_array_equal(np.asarray(image), COLOR[..., :3])


def test_a_photo_without_end_that_is_whole_is_read(tmp_path):
    Image.fromarray(COLOR[..., :3]).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "b.png").write_bytes(whole + bytes(5000))  # phones append films
    assert read_header(str(tmp_path / "b.png"))[0] == (256, 4)
