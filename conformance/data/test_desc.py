import pytest

from rollmatch.data import load_samples


def with_desc(record, desc):
    return {**record, "objects": [{"desc": desc, "bbox_2d": [0, 0, 9, 9]}]}


@pytest.mark.scenario(
    "samples/each-kind-of-bad-object-has-its-code",
    clauses=["samples/an-object-has-a-description-and-exactly-one-shape#1,5,7,8"],
)
@pytest.mark.parametrize(
    ("desc", "code"),
    [
        ("", "desc-empty"),
        (" ", "desc-empty"),
        (None, "desc-empty"),
        (7, "desc-empty"),
        ("red\ncar", "desc-control-character"),
        ("red\tcar", "desc-control-character"),
        ("red\rcar", "desc-control-character"),
        ("red\x00car", "desc-control-character"),
        ("red\u2028car", "desc-control-character"),
        ("red\x85car", "desc-control-character"),
        (" car", "desc-spacing"),
        ("car ", "desc-spacing"),
        ("red  car", "desc-spacing"),
        ("red \u00a0car", "desc-spacing"),
        ("a <|im_end|> b", "desc-special-token"),
        ("<|coord_3|>", "desc-special-token"),
        ("<||>", "desc-special-token"),
    ],
)
def test_a_description_that_would_not_come_back_is_refused(problems_in, record, desc, code):
    assert problems_in(with_desc(record, desc)) == [(code, 1)]


def test_half_a_surrogate_pair_is_refused(problems_in, record):
    text = '{"images": ["a.png"], "width": 8, "height": 6, "objects": [{"desc": "\\ud83d", "bbox_2d": [0, 0, 9, 9]}]}'
    assert problems_in(text) == [("desc-control-character", 1)]


def test_a_missing_description_is_refused(problems_in, record):
    assert problems_in({**record, "objects": [{"bbox_2d": [0, 0, 9, 9]}]}) == [("desc-empty", 1)]


@pytest.mark.parametrize(
    "desc", ["7", "red car", 'a "quoted" \\ word', "caf\u00e9", "\u732b", "\U0001f600", "a < b | c > d", "<coord_3>"]
)
def test_ordinary_text_is_taken_as_it_is(write, record, desc):
    (sample,) = load_samples(write(with_desc(record, desc)))
    assert sample.objects[0].desc == desc
