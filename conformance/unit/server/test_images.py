"""Images, seeds and sampling values of a call: forms of images, their limits, and what stands where none is given."""

import base64
import io
import json

import pytest
from PIL import Image

from conformance.doubles.refusals import refused
from rollmatch.config.limits import LimitsConfig
from rollmatch.server.images import ImageReader, looks_like_path
from rollmatch.server.sampling import MAX_SEED, make_sampling, model_defaults, seeds_of


def png(width, height, *, spare=0):
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue() + bytes(spare)


def reader_with(root, **limits):
    return ImageReader((str(root),), LimitsConfig(**limits))


def sizes(reader, *values):
    budget = reader.budget()
    return [reader.read(value, budget, item=3, key="images").size for value in values], budget.left


def test_every_form_of_an_image_is_the_same_image(tmp_path):
    raw, path = png(4, 2), tmp_path / "a.png"
    path.write_bytes(raw)
    text = base64.b64encode(raw).decode()
    forms = (raw, text, f"{text[:76]}\n {text[76:]}", f"data:image/png;base64,{text}", str(path), f"file://{path}")
    found, left = sizes(reader_with(tmp_path, max_pixels_per_call=100, max_pixels_per_image=50), *forms)
    assert (found, left) == ([(4, 2)] * 6, 100 - 6 * 8)


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        *(([png(4, 4)], None), ([png(17, 1)], "has 17 pixels"), ([png(4, 4), png(2, 8)], None)),
        *(([png(4, 4)] * 3, "brings the call's images above 32 pixels"), ([png(4, 4)] * 2, None)),
        ([png(4, 4), png(1, 1), png(4, 4)], "brings the call's images above 32 pixels"),
    ],
)
def test_pixels_are_counted_as_often_as_an_image_is_used(tmp_path, images, problem):
    reader = reader_with(tmp_path, max_pixels_per_image=16, max_pixels_per_call=32)
    if problem is None:
        assert len(sizes(reader, *images)[0]) == len(images)
        return
    with refused("image-too-large", "images", problem=problem) as caught:
        sizes(reader, *images)
    assert caught.value.item == 3


@pytest.mark.parametrize(("spare", "is_read"), [(0, True), (1, False)])
def test_a_file_is_as_long_as_a_body_at_most(tmp_path, spare, is_read):
    (tmp_path / "a.png").write_bytes(png(4, 4, spare=spare))
    reader = reader_with(tmp_path, max_body_bytes=len(png(4, 4)))
    if is_read:
        assert sizes(reader, str(tmp_path / "a.png"))[0] == [(4, 4)]
        return
    with refused("image-unreadable", "images", problem=f"has more than {len(png(4, 4))} bytes"):
        sizes(reader, str(tmp_path / "a.png"))


@pytest.mark.parametrize(
    ("value", "code", "problem"),
    [
        *(
            (b"x", "image-unreadable", "it is no image that Pillow knows"),
            ("!", "image-path-outside-roots", "is below no image root"),
        ),
        *(
            ("/9j/*", "image-unreadable", "is neither a path nor base64"),
            ("{root}/none.png", "image-unreadable", "is not a file"),
        ),
        *(
            ("{root}/../a.png", "image-path-outside-roots", "{root}"),
            ("/etc/a.png", "image-path-outside-roots", "{root}"),
            ("{root}-of-another/a.png", "image-path-outside-roots", "{root}"),
        ),
    ],
)
def test_what_is_no_image_or_lies_elsewhere_is_refused(tmp_path, value, code, problem):
    if isinstance(value, str):
        value, problem = value.format(root=tmp_path), problem.format(root=tmp_path)
    with refused(code, "images", problem=problem):
        sizes(reader_with(tmp_path), value)
    with refused("image-path-outside-roots", problem="none is set"):
        sizes(ImageReader(()), "/etc/a.png")


def test_a_text_that_is_longer_than_a_path_is_base64():
    assert looks_like_path("a" * 4096)
    assert not looks_like_path("a" * 4097)


@pytest.mark.parametrize(
    ("first", "count", "item", "seeds"),
    [
        *((None, 2, 5, (None, None)), (0, 3, 0, (0, 1, 2)), (10, 2, 3, (16, 17))),
        *((MAX_SEED - 1, 3, 0, (MAX_SEED - 1, MAX_SEED, MAX_SEED)), (1, 0, 0, ())),
    ],
)
def test_seeds_count_up_over_prompts_to_the_largest(first, count, item, seeds):
    assert seeds_of(first, count, item=item) == seeds


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (None, {"temperature": 1.0}),
        ({"top_k": 20, "top_p": None, "max_length": 9}, {"temperature": 1.0, "top_k": 20}),
        ({"temperature": 0.5, "min_p": 0.1}, {"temperature": 0.5, "min_p": 0.1}),
    ],
)
def test_a_model_s_own_values_stand_where_a_call_gives_none(tmp_path, written, read):
    if written is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(written))
    defaults = model_defaults(tmp_path)
    assert defaults == read
    made = make_sampling({"max_tokens": 7, "temperature": None, "top_p": 0.5}, defaults=defaults)
    assert (made.max_tokens, made.temperature, made.top_p) == (7, read["temperature"], 0.5)
    with refused("sampling-value-invalid", "top_p"):
        make_sampling({"max_tokens": 7, "top_p": 1.5}, defaults=defaults)


def test_what_a_call_gives_stands_before_the_servers_own_values_also_where_it_is_0():
    """The greedy call of a model that recommends a temperature."""
    chance = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    defaults = chance | {"presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 2, "ignore_eos": True}
    given = dict.fromkeys(defaults, 0) | {"top_p": 1.0, "repetition_penalty": 1.0, "ignore_eos": False}
    assert make_sampling(given | {"max_tokens": 7}, defaults=defaults).model_dump(include=set(given)) == given
