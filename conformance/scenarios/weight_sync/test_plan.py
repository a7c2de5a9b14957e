"""A plan loses no tensor, mixes no types in a bucket, and is checked against the server before anything is sent."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.doubles.refusals import refused
from rollmatch.weights.nccl import device_of
from rollmatch.weights.plan import DTYPES, Spec, fit, make_plan

SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(st.sampled_from(["float32", "bfloat16", "int64"]), SHAPES), max_size=12).map(
    lambda parts: [Spec(f"t{place}", *part) for place, part in enumerate(parts)]
)
A, B = Spec("a", "float32", (2, 3)), Spec("b", "bfloat16", (4,))
HELD = {"a": A, "b": B}


@pytest.mark.scenario("weight-sync/three-tensors-of-two-types")
def test_tensors_of_a_type_travel_together():
    specs = [Spec("a", "float32", (2,)), Spec("b", "bfloat16", (3,)), Spec("c", "float32", (1,))]
    made = make_plan(specs, bucket_bytes=100)
    held = [[spec.name for spec in made.specs[bucket.start : bucket.stop]] for bucket in made.buckets]
    assert (held, [bucket.num_bytes for bucket in made.buckets]) == ([["a", "c"], ["b"]], [12, 6])


@pytest.mark.scenario(clauses=["weight-sync/buckets-are-cut-the-same-way-every-time#3,4,5"])
@given(SPECS, st.integers(1, 200), st.integers(0, 200))
def test_every_tensor_travels_once_in_buckets_of_one_type(specs, bucket_bytes, tail_bytes):
    made = make_plan(specs, bucket_bytes=bucket_bytes, tail_bytes=tail_bytes)
    assert sorted(made.order) == list(range(len(specs)))
    assert [specs[place] for place in made.order] == list(made.specs)
    assert [p for bucket in made.buckets for p in range(bucket.start, bucket.stop)] == list(range(len(specs)))
    assert made.num_bytes == sum(spec.num_bytes for spec in specs)
    for bucket in made.buckets:
        inside = made.specs[bucket.start : bucket.stop]
        sizes = [DTYPES[spec.dtype].itemsize * math.prod(spec.shape) for spec in inside]
        assert (bucket.num_bytes, {spec.dtype for spec in inside}) == (sum(sizes), {inside[0].dtype})
        assert bucket.num_bytes <= bucket_bytes or len(inside) == 1
        assert not tail_bytes or sizes == sorted(sizes, reverse=True)
    if tail_bytes and made.buckets and made.specs[-1].num_bytes <= tail_bytes:
        assert made.buckets[-1].num_bytes <= tail_bytes
    plain = make_plan(specs, bucket_bytes=bucket_bytes)
    assert [spec.dtype for spec in made.specs] == [spec.dtype for spec in plain.specs]


@pytest.mark.scenario(clauses=["weight-sync/buckets-are-cut-the-same-way-every-time#1,2"])
@example([Spec("a", "float32", (1,)), Spec("b", "float32", (1,))], 8)  # they just fit
@given(SPECS, st.integers(1, 200))
def test_without_a_tail_order_is_kept_and_no_two_neighbours_fit_into_one_bucket(specs, bucket_bytes):
    made = make_plan(specs, bucket_bytes=bucket_bytes)
    for kind in DTYPES:
        assert [s for s in made.specs if s.dtype == kind] == [s for s in specs if s.dtype == kind]
    for one, other in zip(made.buckets, made.buckets[1:], strict=False):
        first = made.specs[other.start]
        assert made.specs[one.start].dtype != first.dtype or one.num_bytes + first.num_bytes > bucket_bytes


def test_what_fits_gets_the_types_that_the_server_holds():
    learner = [B._replace(dtype="float32"), A]
    assert fit(learner, HELD, {}, server="s") == [B, A]
    assert fit([A, B, Spec("head", "float32", (2, 3))], HELD, {"head": "a"}, server="s")[2].dtype == "float32"


@pytest.mark.parametrize(
    ("learner", "code", "key"),
    [
        *(([A], "tensor-missing", "b"), ([], "tensor-missing", "a")),
        ([A, B, Spec("c", "float32", (1,))], "tensor-unknown", "c"),
        ([A, B, Spec("base_model.model.a", "float32", (2, 3))], "tensor-unknown", "base_model.model.a"),
        ([A._replace(shape=(3, 2)), B], "tensor-shape-mismatch", "a"),
        ([A._replace(shape=(6,)), B], "tensor-shape-mismatch", "a"),
        ([A._replace(dtype="int64"), B], "tensor-dtype-mismatch", "a"),
        ([A, B, Spec("head", "float32", (9, 9))], "tensor-shape-mismatch", "head"),
    ],
)
def test_what_does_not_fit_is_named(learner, code, key):
    with refused(code, key, problem="http://s:1") as caught:
        fit(learner, HELD, {"head": "a"}, server="http://s:1")
    assert caught.value.remedy


def test_a_group_opens_on_the_device_of_the_weights(monkeypatch):
    class Weight:
        device = torch.device("cuda", 3)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    on_cpu = ("a", torch.zeros(1))
    assert device_of([on_cpu, ("b", Weight())]) == torch.device("cuda", 3)
    assert device_of([on_cpu]) == torch.device("cuda", 1)
