"""Thinning: fewer rows, the extremes among them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmatch.report.curves import running_mean, thin

columns = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300)


@settings(deadline=None)
@given(columns, st.integers(4, 60))
def test_extremes_and_ends_survive_within_the_limit(column, limit):
    kept = thin([column], limit=limit)
    assert list(kept) == sorted(set(kept))
    assert len(kept) <= limit + 2
    assert {0, len(column) - 1} <= set(kept)
    known = [value for value in column if value is not None]
    if known:
        survivors = [column[row] for row in kept if column[row] is not None]
        assert (min(survivors), max(survivors)) == (min(known), max(known))


@settings(deadline=None)
@given(columns, st.integers(1, 9))
def test_a_running_mean_stays_between_its_neighbours(column, window):
    means = running_mean(column, window=window)
    assert [mean is None for mean in means] == [value is None for value in column]
    for row, mean in enumerate(means):
        if mean is not None:
            around = column[max(0, row - window // 2) : row + window // 2 + 1]
            known = [value for value in around if value is not None]
            assert min(known) - 1e-6 <= mean <= max(known) + 1e-6
