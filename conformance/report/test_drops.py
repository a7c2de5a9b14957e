"""The table of drop reasons."""

import pytest

from rollmatch.report.facts import make_drop_rows
from rollmatch.report.history import make_history


def rows(*drops):
    return make_drop_rows(
        make_history({"event": "step", "step": number, "drops": one} for number, one in enumerate(drops, start=1))
    )


def test_reasons_are_counted_over_both_halves_most_frequent_first():
    table = rows({"b": 1, "a": 1}, {"a": 3}, {"a": 1, "c": 5}, {})
    assert [(row.reason, row.first_half, row.second_half, row.total) for row in table] == [
        ("a", 4, 1, 5),
        ("c", 0, 5, 5),
        ("b", 1, 0, 1),
    ]
    assert sum(row.share for row in table) == pytest.approx(1.0, abs=1e-3)
    assert table[0].share_text == "45.5%"


@pytest.mark.parametrize("drops", [None, [], {}, {"a": 0}, {"a": float("nan")}, {"a": "many"}])
def test_nothing_dropped_is_no_table(drops):
    assert rows(drops) == ()
    assert len(rows({"a": 1})) == 1
