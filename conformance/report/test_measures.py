"""What became of the measures between two evaluations."""

import pytest

from rollmatch.report.verdict import MEASURES, compare


def change(key, before, after):
    return next(one for one in compare({key: before}, {key: after}) if one.measure.key == key)


@pytest.mark.parametrize(
    ("key", "before", "after", "verdict", "direction", "delta"),
    [
        ("f1", 0.2, 0.7, "better", 1, "+0.500"),
        ("f1", 0.7, 0.2, "worse", -1, "-0.500"),
        ("invalid_rate", 0.4, 0.1, "better", -1, "-30.0 pp"),
        ("invalid_rate", 0.1, 0.4, "worse", 1, "+30.0 pp"),
        ("f1", 0.5, 0.5004, "same", 0, "+0.000"),
        ("f1", 0.5, 0.4996, "same", 0, "+0.000"),
        ("f1", 0.5, float("nan"), "", 0, "-"),
        ("f1", None, 0.5, "", 0, "-"),
    ],
)
def test_a_change_is_judged_in_its_own_sense(key, before, after, verdict, direction, delta):
    one = change(key, before, after)
    assert (one.verdict, one.direction, one.delta_text) == (verdict, direction, delta)


def test_places_on_the_track_stay_on_it():
    one = change("f1", -0.5, 1.5)
    assert (one.before_percent, one.after_percent) == (0.0, 100.0)


def test_an_evaluation_that_has_not_happened_leaves_all_changes_open():
    changes = compare({"f1": 0.5}, None)
    assert len(changes) == len(MEASURES)
    assert {one.verdict for one in changes} == {""}
    assert changes[0].before_text == "0.500"
    assert changes[0].after_text == "-"
