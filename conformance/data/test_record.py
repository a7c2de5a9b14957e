import pytest

from rollmatch.data import load_samples

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
    ("name", "value", "code"),
    [
        ("images", GONE, "field-missing"),
        ("objects", GONE, "field-missing"),
        ("width", GONE, "field-missing"),
        ("height", GONE, "field-missing"),
        ("image", "a.png", "field-unknown"),
        ("images", [], "field-type"),
        ("images", "a.png", "field-type"),
        ("images", None, "field-type"),
        ("images", ["a.png", 3], "field-type"),
        ("images", [""], "field-type"),
        ("images", ["b.png"], "image-missing"),
        ("images", ["a.png", "b.png"], "image-missing"),
        ("width", 0, "field-type"),
        ("width", 8.0, "field-type"),
        ("height", "6", "field-type"),
        ("height", True, "field-type"),
        ("width", 9, "image-size-mismatch"),
        ("height", 7, "image-size-mismatch"),
        ("objects", {}, "field-type"),
        ("objects", None, "field-type"),
        ("objects", ["seven"], "field-type"),
        ("objects", [{"desc": "seven", "bbox_2d": [0, 0, 1, 1], "label": 7}], "field-unknown"),
        ("metadata", [], "field-type"),
        ("metadata", None, "field-type"),
    ],
)
def test_a_spoiled_record_is_refused(problems_in, record, name, value, code):
    assert problems_in(record, spoiled(record, name, value)) == [(code, 2)]


@pytest.mark.parametrize("line", ["[]", '"text"', "3", "null"])
def test_a_line_holds_an_object(problems_in, line):
    assert problems_in(line) == [("field-type", 1)]


def test_all_problems_of_a_record_are_told(problems_in, record):
    bad = {**record, "height": -1, "note": 1, "objects": [{"desc": "", "bbox_2d": [3, 3, 3, 4]}, {"desc": "a"}]}
    assert problems_in(bad) == [
        ("field-unknown", 1),
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


def test_a_record_may_have_no_object_and_several_images(write, record):
    (sample,) = load_samples(write({**record, "images": ["a.png", "./a.png"], "objects": []}))
    assert sample.objects == ()
    assert len(sample.images) == 2
