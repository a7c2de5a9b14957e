"""Requests are cut into contiguous chunks, in order, one per server that has any."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmatch.rollout import work_items
from rollmatch.rollout.work_items import Chunk, cut_chunks

NUM_REQUESTS, NUM_SERVERS = st.integers(0, 300), st.integers(1, 20)


def test_the_examples_hold():
    assert doctest.testmod(work_items).failed == 0


@pytest.mark.parametrize(
    ("num_requests", "num_servers", "spans"),
    [
        (4, 3, [(0, 2), (2, 4)]),
        (7, 3, [(0, 3), (3, 6), (6, 7)]),
        (1, 3, [(0, 1)]),
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (0, 3, []),
        (5, 1, [(0, 5)]),
    ],
)
def test_chunks_are_as_the_rule_says(num_requests, num_servers, spans):
    assert cut_chunks(num_requests, num_servers) == [Chunk(server, *span) for server, span in enumerate(spans)]


@given(NUM_REQUESTS, NUM_SERVERS)
def test_chunks_follow_the_formula(num_requests, num_servers):
    size = (num_requests + num_servers - 1) // num_servers
    expected = [list(range(num_requests))[size * i : size * (i + 1)] for i in range(num_servers)]
    chunks = cut_chunks(num_requests, num_servers)
    assert [list(range(c.start, c.stop)) for c in chunks] == [part for part in expected if part]
    assert [c.server_index for c in chunks] == [i for i, part in enumerate(expected) if part]


@given(NUM_REQUESTS, NUM_SERVERS)
def test_chunks_put_together_are_the_list(num_requests, num_servers):
    items = list(range(num_requests))
    assert [item for c in cut_chunks(num_requests, num_servers) for item in c.of(items)] == items


@given(st.integers(0, 50), st.integers(0, 9), st.integers(2, 200))
def test_halves_are_smaller_and_lose_nothing(start, server, length):
    whole = Chunk(server, start, start + length)
    first, second = whole.halves()
    assert (first.start, first.stop, second.stop) == (whole.start, second.start, whole.stop)
    assert 0 <= first.num_requests - second.num_requests <= 1
    assert {first.server_index, second.server_index} == {server}
