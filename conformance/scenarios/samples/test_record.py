"""Records of a data set: their fields, descriptions and images."""

import pytest
from PIL import Image

from conformance.doubles.refusals import refused
from rollmatch.data import load_samples
from rollmatch.data.image import check_image

GONE = object()


def spoiled(record, name, value):
    rest = {key: kept for key, kept in record.items() if key != name}
    return rest if value is GONE else {**rest, name: value}


@pytest.mark.scenario(
    "samples/a-size-that-is-not-the-image-s-is-refused",
    "samples/a-line-without-a-width-is-refused",
    "samples/a-field-of-no-contract-is-refused",
    clauses=["samples/a-sample-is-one-json-object-on-one-line#3,5,6"],
)
@pytest.mark.parametrize(
    ("name", "values", "code"),
    [
        *((name, [GONE, None], "field-missing") for name in ("images", "objects", "width", "height")),
        ("image", ["a.png"], "field-unknown"),
        ("images", [[], "a.png", ["a.png", 3], [""]], "field-type"),
        ("images", [["b.png"], ["a.png", "b.png"]], "image-missing"),
        ("width", [0, 8.0], "field-type"),
        ("height", ["6", True], "field-type"),
        ("width", [9], "image-size-mismatch"),
        ("height", [7], "image-size-mismatch"),
        ("objects", [{}, ["seven"], [None]], "field-type"),
        ("objects", [[{"desc": "seven", "bbox_2d": [0, 0, 1, 1], "label": 7}]], "field-unknown"),
        ("metadata", [[], 0], "field-type"),
    ],
)
def test_a_spoiled_record_is_refused(problems_in, record, name, values, code):
    lines = [spoiled(record, name, value) for value in values]
    assert problems_in(record, *lines) == [(code, number) for number in range(2, len(values) + 2)]


def test_a_line_holds_an_object(problems_in):
    assert problems_in("[]", '"text"', "3", "null") == [("field-type", number) for number in (1, 2, 3, 4)]


def test_all_problems_of_a_record_are_reported(problems_in, record):
    bad = {**record, "height": -1, "note": 1, "objects": [3, {"desc": "", "bbox_2d": [3, 3, 3, 4]}, {"desc": "a"}]}
    assert problems_in(bad) == [
        ("field-unknown", 1),
        ("field-type", 1),
        ("field-type", 1),
        ("desc-empty", 1),
        ("box-without-area", 1),
        ("geometry-not-single", 1),
    ]


@pytest.mark.scenario(
    "samples/a-line-of-the-contract-becomes-a-sample",
    clauses=["samples/a-sample-is-one-json-object-on-one-line#1,2,3,4"],
)
def test_a_good_record_becomes_a_sample(write, record, tmp_path):
    metadata = {"source": "hand", "nested": {"a": [1]}}
    (sample,) = load_samples(write({**record, "metadata": metadata}))
    assert sample.sample_id == 0
    assert sample.origin == f"{tmp_path / 'train.jsonl'}:1"
    assert sample.images == (str(tmp_path / "a.png"),)
    assert (sample.width, sample.height, sample.metadata) == (8, 6, metadata)
    (truth,) = sample.objects
    assert (truth.desc, truth.geometry, truth.bins) == ("seven", "bbox_2d", (10, 20, 30, 40))


def test_a_record_without_an_image_is_asked_for_one(write, record):
    with refused("field-type", problem="a list of one or more paths"):
        load_samples(write({**record, "images": []}))


def test_a_record_may_have_no_object_and_several_images(write, record):
    (sample,) = load_samples(write({**record, "images": ["a.png", "./a.png"], "objects": []}))
    assert sample.objects == ()
    assert len(sample.images) == 2


KEY = "train.jsonl:1"


def codes(path, size=(8, 6)):
    found = list(check_image(str(path), size=size, key=KEY))
    assert all(error.key == KEY for error in found)
    return [error.code for error in found]


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_width_comes_first(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    Image.new("RGB", (8, 6)).save(path)
    assert codes(path) == []
    assert codes(path, (6, 8)) == ["image-size-mismatch"]


@pytest.mark.scenario(
    "samples/an-image-that-is-not-there-is-refused", clauses=["samples/a-sample-is-one-json-object-on-one-line#7"]
)
def test_what_is_no_image_is_refused(tmp_path):
    path = tmp_path / "a.png"
    path.write_text("text")
    assert codes(path) == ["image-unreadable"]
    assert codes(tmp_path) == ["image-unreadable"]
    assert codes(tmp_path / "b.png") == ["image-missing"]
    assert codes("a\x00b.png") == ["image-unreadable"]
    assert codes(tmp_path / "b.png", None) == ["image-missing"]


@pytest.mark.scenario(
    "samples/an-image-that-is-not-there-is-refused", clauses=["samples/a-sample-is-one-json-object-on-one-line#7"]
)
def test_an_image_that_is_to_be_turned_is_refused(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 6)).save(tmp_path / "turned.jpg", exif=exif)
    exif[0x0112] = 1
    Image.new("RGB", (8, 6)).save(tmp_path / "upright.jpg", exif=exif)
    assert codes(tmp_path / "turned.jpg") == ["image-turned"]
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    Image.new("RGB", (8, 6)).save(tmp_path / "xmp.jpg", xmp=xmp)
    assert codes(tmp_path / "xmp.jpg") == ["image-turned"]
    assert codes(tmp_path / "upright.jpg") == []


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_only_the_header_and_the_end_are_read(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    Image.effect_noise((256, 256), 50).save(path)
    whole = path.read_bytes()
    for name, raw, found in (
        ("half", whole[: len(whole) // 2], ["image-unreadable"]),
        ("followed", whole + bytes(9999), []),
        ("damaged", whole[: len(whole) // 2] + bytes(50) + whole[len(whole) // 2 + 50 :], []),
    ):
        (tmp_path / f"{name}.{suffix}").write_bytes(raw)
        assert codes(tmp_path / f"{name}.{suffix}", (256, 256)) == found, name


@pytest.mark.scenario(clauses=["samples/a-sample-is-one-json-object-on-one-line#7"])
@pytest.mark.parametrize("suffix", ["webp", "gif", "bmp", "tif", "ppm", "tga", "jp2", "avif", "ico"])
@pytest.mark.parametrize("is_noise", [True, False])
def test_a_part_of_an_image_is_refused_in_every_format(tmp_path, suffix, is_noise):
    path = tmp_path / f"a.{suffix}"
    (Image.effect_noise((64, 64), 50) if is_noise else Image.new("L", (64, 64))).save(path)
    assert codes(path, (64, 64)) == []
    (tmp_path / f"half.{suffix}").write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert codes(tmp_path / f"half.{suffix}", (64, 64)) == ["image-unreadable"]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_whose_white_is_unknown_are_refused(tmp_path, mode):
    Image.new(mode, (8, 6)).save(tmp_path / "a.tif")
    assert codes(tmp_path / "a.tif") == ["image-unreadable"]


def test_paths_of_images_are_absolute_below_their_root_or_file(write, record, tmp_path, monkeypatch):
    (tmp_path / "root").mkdir()
    Image.new("L", (8, 6)).save(tmp_path / "root" / "b.png")
    (sample,) = load_samples(write({**record, "images": ["b.png"]}), tmp_path / "root")
    assert sample.images == (str(tmp_path / "root" / "b.png"),)
    path = write(record)
    monkeypatch.chdir(tmp_path)
    (sample,) = load_samples(path.name)
    assert sample.images == (str(tmp_path / "a.png"),)


def with_desc(record, desc):
    described = {} if desc is GONE else {"desc": desc}
    return {**record, "objects": [{**described, "bbox_2d": [0, 0, 9, 9]}]}


@pytest.mark.scenario(
    "samples/each-kind-of-bad-object-has-its-code",
    clauses=["samples/an-object-has-a-description-and-exactly-one-shape#1,5,7,8"],
)
@pytest.mark.parametrize(
    ("descs", "code"),
    [
        (("", " ", None, 7, GONE), "desc-empty"),
        (tuple(f"red{space}car" for space in "\n\t\r\x00\u2028\x85"), "desc-control-character"),
        (("\ud83d",), "desc-control-character"),
        ((" car", "car ", "red  car", "red \u00a0car"), "desc-spacing"),
        (("a <|im_end|> b", "<|coord_3|>", "<||>"), "desc-special-token"),
    ],
)
def test_a_description_that_would_not_come_back_is_refused(problems_in, record, descs, code):
    lines = [with_desc(record, desc) for desc in descs]
    assert problems_in(*lines) == [(code, number) for number in range(1, len(descs) + 1)]


def test_ordinary_text_is_taken_as_it_is(write, record):
    plain = ["7", "red car", 'a "quoted" \\ word', "caf\u00e9", "\u732b", "\U0001f600", "a < b | c > d", "<coord_3>"]
    samples = load_samples(write(*(with_desc(record, desc) for desc in plain)))
    assert [sample.objects[0].desc for sample in samples] == plain
