import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmatch.data import load_samples
from rollmatch.data.geometry import bins_of, check_geometry, read_bin, twice_area
from rollmatch.records import Geometry

BINS = st.integers(0, 999)
SPELLED = ("<|coord_1000|>", "<|coord_007|>", "<|coord_*|>", "<|coord_5|> ")


def codes(item):
    errors = list(check_geometry(item, key="a.jsonl:3", place="objects[0]"))
    assert all(error.key == "a.jsonl:3" and "objects[0]" in error.problem for error in errors)
    return [error.code for error in errors]


@pytest.mark.scenario(
    "samples/a-box-without-area-is-refused",
    "samples/two-shapes-on-one-object-are-refused",
    "samples/each-kind-of-bad-object-has-its-code",
    "samples/a-wrong-number-of-points-is-refused",
    clauses=["samples/an-object-has-a-description-and-exactly-one-shape#1,2,3,4,5,7,8,9,10"],
)
@pytest.mark.parametrize(
    ("items", "code"),
    [
        ([{}, {"bbox_2d": [0, 0, 9, 9], "poly": [0, 0, 9, 0, 9, 9]}], "geometry-not-single"),
        ([{"bbox_2d": bins} for bins in ([0, 0, 9], [0, 0, 9, 9, 9, 9], "0 0 9 9", None)], "geometry-length"),
        (
            [{"poly": bins} for bins in ([0, 0, 9, 9], [0, 0, 9, 0, 9, 9, 5], [[0, 0], [9, 0], [9, 9]])],
            "geometry-length",
        ),
        ([{"poly": [[0, 0], [9, 0], [9, 9], [9, 9], [9, 9], [9, 9]]}], "bin-invalid"),
        ([{"poly": [0, 0, 9, 0, 9, 9], "poly_points": number} for number in (4, "3")], "poly-points-mismatch"),
        ([{"bbox_2d": [0, 0, 9, 9], "poly_points": 2}], "poly-points-mismatch"),
        ([{"bbox_2d": [0, 0, 9, 1000]}], "bin-invalid"),
        ([{"bbox_2d": [first, 0, 9, 9]} for first in (-1, 0.0, True, "5", *SPELLED)], "bin-invalid"),
        ([{"bbox_2d": bins} for bins in ([9, 0, 9, 9], [0, 9, 9, 9], [9, 9, 0, 0], [0, 9, 9, 0])], "box-without-area"),
        ([{"poly": bins} for bins in ([0, 0, 5, 5, 9, 9], [3, 3, 3, 3, 3, 3])], "poly-without-area"),
    ],
)
def test_a_wrong_shape_is_refused(items, code):
    assert [codes(item) for item in items] == [[code]] * len(items)


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        ({"poly": [0, 0, 9, 0, 9, 9], "poly_points": 4}, "poly_points must be 3, but is 4"),
        ({"bbox_2d": [0, 0, 9, 9], "poly_points": 2}, "poly_points must not stand beside a box, but is 2"),
    ],
)
def test_a_wrong_number_of_points_is_named_with_the_right_one(item, wanted):
    (error,) = check_geometry(item, key="a.jsonl:3", place="objects[0]")
    assert error.problem == f"objects[0]: {wanted}"


@pytest.mark.scenario("samples/a-box-with-area-is-accepted")
@pytest.mark.parametrize(
    "item",
    [
        {"bbox_2d": [0, 0, 1, 1]},
        {"bbox_2d": [0, 0, 999, 999]},
        {"bbox_2d": ["<|coord_0|>", 0, "<|coord_999|>", 9]},
        {"poly": [0, 0, 9, 0, 9, 9]},
        {"poly": [0, 0, 9, 9, 9, 0], "poly_points": 3},
        {"poly": [0, 0, 1, 0, 1, 1, 0, 1], "poly_points": 4},
        {"poly": [0, 0, *(part for x in range(399) for part in (x, 900))], "poly_points": 400},
    ],
)
def test_a_right_shape_is_accepted(item):
    assert codes(item) == []


@given(bins=st.lists(BINS, min_size=4, max_size=4))
def test_a_box_is_accepted_exactly_when_it_has_an_area(bins):
    left, top, right, bottom = bins
    assert (codes({"bbox_2d": bins}) == []) is (left < right and top < bottom)


@given(value=BINS)
def test_numbers_and_literals_mean_the_same(value):
    assert read_bin(value) == read_bin(f"<|coord_{value}|>") == value


@given(points=st.lists(st.tuples(BINS, BINS), min_size=3, max_size=8), shift=st.integers(0, 7))
def test_the_area_does_not_depend_on_the_first_point_and_turns_sign_with_direction(points, shift):
    shift %= len(points)
    area = twice_area([value for point in points for value in point])
    turned = points[shift:] + points[:shift]
    assert twice_area([value for point in turned for value in point]) == area
    assert twice_area([value for point in points[::-1] for value in point]) == -area
    assert twice_area((1, 2, 4, 2, 4, 7, 1, 7)) == 2 * 3 * 5


def test_literals_become_bins_in_a_sample(write, record):
    poly = [0, "<|coord_7|>", 9, 0, "<|coord_99|>", 9]
    (sample,) = load_samples(write({**record, "objects": [{"desc": "leaf", "poly": poly, "poly_points": 3}]}))
    assert sample.objects[0].geometry is Geometry.POLY
    assert sample.objects[0].bins == bins_of(poly) == (0, 7, 9, 0, 99, 9)
