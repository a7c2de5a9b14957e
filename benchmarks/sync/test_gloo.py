"""About 500 MB in our buckets, and by a whole sync, beside a bare gloo broadcast of the same bytes."""

import itertools

import pytest

from benchmarks.sync.gloo_peers import bare_broadcast, bucketed_broadcast
from benchmarks.sync.receiving_server import native_sender, receiving, weights_of
from rollmatch.weights.gloo import BUCKET_BYTES
from rollmatch.weights.plan import make_plan, spec_of

NUM_TENSORS, NUM_FLOATS = 120, 2**20
BAR = 1 / 1.5
"""At most 1.5 x the time of the bare broadcast."""


@pytest.fixture(scope="module")
def weights():
    return weights_of(NUM_TENSORS, NUM_FLOATS)


@pytest.fixture(scope="module")
def broadcast_bare(weights):
    with bare_broadcast(sum(tensor.nbytes for _, tensor in weights)) as send:
        send()
        yield send


@pytest.fixture
def broadcast_in_buckets(weights):
    plan = make_plan([spec_of(*pair) for pair in weights], bucket_bytes=BUCKET_BYTES)
    tensors = [weights[place][1] for place in plan.order]
    with bucketed_broadcast([tensors[bucket.start : bucket.stop] for bucket in plan.buckets]) as send:
        send()
        yield send


@pytest.fixture
def sync(weights):
    versions = itertools.count(1)
    with receiving(NUM_TENSORS, NUM_FLOATS) as (url,), native_sender(url) as sender:

        def send():
            sender.send(weights, version=next(versions))

        send()
        yield send


def test_our_buckets_beside_a_bare_broadcast(side_by_side, broadcast_in_buckets, broadcast_bare):
    side_by_side(broadcast_in_buckets, broadcast_bare, bar=BAR, rounds=9)


def test_a_whole_sync_beside_a_bare_broadcast(side_by_side, sync, broadcast_bare):
    """With digests on both sides, announcement, hand-shake and commit, all on the same cores."""
    side_by_side(sync, broadcast_bare, bar=BAR, rounds=9)
