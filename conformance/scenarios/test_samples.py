"""Capability ``samples``, scenario by scenario."""

import json

import pytest
from PIL import Image

from conformance.scenarios.configs import not_refused
from rollmatch.data import BadSamples, load_samples

GOOD = {
    "images": ["a.png"],
    "objects": [{"desc": "seven", "bbox_2d": [10, 20, 300, 400]}],
    "width": 128,
    "height": 96,
}


@pytest.fixture
def file_of(tmp_path):
    """Records, or raw lines, beside an image of 128 x 96 pixels."""
    Image.new("L", (128, 96)).save(tmp_path / "a.png")

    def write(*lines):
        path = tmp_path / "train.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def refusals(path):
    with pytest.raises(BadSamples) as caught:
        load_samples(path)
    assert all(error.problem and error.remedy for error in caught.value.errors)
    return [(error.code, error.key.removeprefix(str(path))) for error in caught.value.errors]


def with_object(**changes):
    return {**GOOD, "objects": [{**GOOD["objects"][0], **changes}]}


@pytest.mark.scenario(
    "samples/a-line-of-the-contract-becomes-a-sample",
    clauses=["samples/a-sample-is-one-json-object-on-one-line#1,2,3,4"],
)
def test_a_line_of_the_contract_becomes_a_sample(file_of, tmp_path):
    with not_refused():
        (sample,) = load_samples(file_of({**GOOD, "metadata": {"source": [1]}}))
    assert [(each.desc, each.bins) for each in sample.objects] == [("seven", (10, 20, 300, 400))]
    assert sample.images == (str(tmp_path / "a.png"),)
    assert sample.metadata == {"source": [1]}
    assert refusals(file_of({**GOOD, "colour": "red"})) == [("field-unknown", ":1")]
    assert refusals(file_of({k: v for k, v in GOOD.items() if k != "width"})) == [("field-missing", ":1")]


@pytest.mark.scenario(
    "samples/a-size-that-is-not-the-image-s-is-refused", clauses=["samples/a-sample-is-one-json-object-on-one-line#5"]
)
def test_a_size_that_is_not_the_images_is_refused(file_of):
    assert refusals(file_of({**GOOD, "width": 127})) == [("image-size-mismatch", ":1")]


@pytest.mark.scenario(
    "samples/a-box-without-area-is-refused", clauses=["samples/an-object-has-a-description-and-exactly-one-shape#3"]
)
def test_a_box_without_area_is_refused(file_of):
    assert refusals(file_of(with_object(bbox_2d=[300, 20, 300, 400]))) == [("box-without-area", ":1")]


@pytest.mark.scenario("samples/a-box-with-area-is-accepted")
def test_a_box_with_area_is_accepted(file_of):
    with not_refused():
        (sample,) = load_samples(file_of(with_object(bbox_2d=[299, 20, 300, 400])))
    assert sample.objects[0].bins == (299, 20, 300, 400)


@pytest.mark.scenario(
    "samples/two-shapes-on-one-object-are-refused",
    clauses=["samples/an-object-has-a-description-and-exactly-one-shape#2,4"],
)
def test_two_shapes_on_one_object_are_refused(file_of):
    poly = [10, 10, 90, 10, 90, 90]
    assert refusals(file_of(with_object(poly=poly))) == [("geometry-not-single", ":1")]
    flat = {**GOOD, "objects": [{"desc": "leaf", "poly": poly}]}
    assert len(load_samples(file_of(flat))) == 1
    line = {**GOOD, "objects": [{"desc": "leaf", "poly": [10, 10, 20, 20, 30, 30]}]}
    assert refusals(file_of(line)) == [("poly-without-area", ":1")]


@pytest.mark.scenario(clauses=["samples/an-object-has-a-description-and-exactly-one-shape#1,5"])
@pytest.mark.parametrize("desc", ["", " ", "a\nb", "a\tb", "a  b", "<|im_end|>"])
def test_a_description_that_would_not_come_back_is_refused(desc, file_of):
    assert len(refusals(file_of(with_object(desc=desc)))) == 1
    assert len(load_samples(file_of(with_object(desc="a b")))) == 1
    assert load_samples(file_of(with_object(bbox_2d=["<|coord_10|>", 20, 300, 999])))[0].objects[0].bins[0] == 10
    assert refusals(file_of(with_object(bbox_2d=["<|coord_1000|>", 20, 300, 400]))) == [("bin-invalid", ":1")]


@pytest.mark.scenario(
    "samples/two-bad-lines-are-reported-together", clauses=["samples/bad-records-stop-a-run-before-training#1,2,3"]
)
def test_two_bad_lines_are_reported_together(file_of):
    path = file_of(GOOD, "", GOOD, with_object(bbox_2d=[10, 20, 300, 1000]))
    assert refusals(path) == [("line-not-json", ":2"), ("bin-invalid", ":4")]


@pytest.mark.scenario(
    "samples/a-line-without-a-width-is-refused", clauses=["samples/a-sample-is-one-json-object-on-one-line#6"]
)
def test_a_line_without_a_width_is_refused(file_of):
    assert refusals(file_of({name: value for name, value in GOOD.items() if name != "width"})) == [
        ("field-missing", ":1")
    ]
    assert refusals(file_of({**GOOD, "width": "128"})) == [("field-type", ":1")]


@pytest.mark.scenario(
    "samples/a-field-of-no-contract-is-refused", clauses=["samples/a-sample-is-one-json-object-on-one-line#3"]
)
def test_a_field_of_no_contract_is_refused(file_of):
    assert refusals(file_of({**GOOD, "label": 3})) == [("field-unknown", ":1")]


@pytest.mark.scenario(
    "samples/an-image-that-is-not-there-is-refused", clauses=["samples/a-sample-is-one-json-object-on-one-line#7"]
)
def test_an_image_that_is_not_there_is_refused(file_of, tmp_path):
    path = file_of(GOOD)
    (tmp_path / "a.png").unlink()
    assert refusals(path) == [("image-missing", ":1")]
    (tmp_path / "b.png").write_text("no image")
    assert refusals(file_of({**GOOD, "images": ["b.png"]})) == [("image-unreadable", ":1")]
    turned = Image.new("L", (128, 96)).getexif()
    turned[0x0112] = 6
    Image.new("L", (128, 96)).save(tmp_path / "c.png", exif=turned)
    assert refusals(file_of({**GOOD, "images": ["c.png"]})) == [("image-turned", ":1")]


BROKEN = (
    ("desc-empty", {"desc": ""}),
    ("desc-control-character", {"desc": "a\tb"}),
    ("desc-spacing", {"desc": "a "}),
    ("desc-special-token", {"desc": "<|im_end|>"}),
    ("geometry-not-single", {"bbox_2d": None}),
    ("geometry-length", {"bbox_2d": [1, 2, 3]}),
    ("bin-invalid", {"bbox_2d": [1, 2, 3, 1000]}),
    ("box-without-area", {"bbox_2d": [3, 2, 3, 9]}),
    ("poly-without-area", {"bbox_2d": None, "poly": [1, 1, 5, 5, 9, 9]}),
)


@pytest.mark.scenario(
    "samples/each-kind-of-bad-object-has-its-code",
    clauses=["samples/an-object-has-a-description-and-exactly-one-shape#7,8"],
)
def test_each_kind_of_bad_object_has_its_code(file_of):
    lines = []
    for _, changes in BROKEN:
        item = {**GOOD["objects"][0], **changes}
        lines.append({**GOOD, "objects": [{name: value for name, value in item.items() if value is not None}]})
    assert refusals(file_of(*lines)) == [(code, f":{line}") for line, (code, _) in enumerate(BROKEN, 1)]


@pytest.mark.scenario(
    "samples/a-wrong-number-of-points-is-refused",
    clauses=["samples/an-object-has-a-description-and-exactly-one-shape#9,10"],
)
def test_a_wrong_number_of_points_is_refused(file_of):
    def with_points(number):
        return {**GOOD, "objects": [{"desc": "leaf", "poly": [1, 1, 9, 1, 9, 9], "poly_points": number}]}

    assert refusals(file_of(with_points(4))) == [("poly-points-mismatch", ":1")]
    assert len(load_samples(file_of(with_points(3)))) == 1


@pytest.mark.scenario("samples/an-empty-file-is-refused", clauses=["samples/bad-records-stop-a-run-before-training#4"])
def test_an_empty_file_is_refused(file_of):
    assert refusals(file_of()) == [("dataset-empty", "")]
