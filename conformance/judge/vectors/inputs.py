"""Inputs of the vectors: what is special, by hand, then what is drawn from a seed."""

import random
from collections.abc import Iterator
from typing import Any

from conformance.judge.vectors.answers_drawn import append_inputs, parse_inputs

Given = tuple[str, dict[str, Any]]
"""What is special about it, and the input."""
RULES = {"candidate_top_k": 10, "maskiou_gate": 0.3, "maskiou_resolution": 256, "fp_cost": 1.0, "fn_cost": 1.0}
BOX, FAR = [100, 100, 300, 300], [600, 600, 800, 800]


def box(bins: list[int]) -> dict[str, Any]:
    return {"geometry": "bbox_2d", "bins": bins}


def match_inputs(rng: random.Random) -> Iterator[Given]:
    def given(predicted: list[Any], truth: list[Any], **rules: Any) -> dict[str, Any]:
        return {"predicted": predicted, "truth": truth, "rules": RULES | rules}

    yield "nothing at all", given([], [])
    yield "nothing predicted", given([], [box(BOX), box(FAR)])
    yield "nothing true", given([box(BOX)], [])
    yield "two equal predictions: the first is matched", given([box(BOX), box(BOX)], [box(BOX)])
    yield "two equal true objects: the first is matched", given([box(BOX)], [box(BOX), box(BOX)])
    yield "under the gate", given([box(BOX)], [box([250, 250, 450, 450])])
    yield "without a gate", given([box(BOX)], [box([250, 250, 450, 450])], maskiou_gate=0.0)
    yield "leaving both alone is cheaper", given([box(BOX)], [box([150, 100, 350, 300])], fp_cost=0.1, fn_cost=0.1)
    yield "thinner than a cell", given([box([10, 10, 11, 500])], [box([10, 10, 11, 500])])
    yield "one candidate each", given([box(BOX), box([110, 110, 310, 310])], [box(BOX), box(FAR)], candidate_top_k=1)
    yield "a polygon and its box", given([{"geometry": "poly", "bins": [100, 100, 300, 100, 300, 300]}], [box(BOX)])
    for _ in range(14):
        truth = [_shape(rng) for _ in range(rng.randint(1, 5))]
        predicted = [_moved(rng, one) for one in rng.sample(truth, rng.randint(1, len(truth)))]
        predicted += [_shape(rng) for _ in range(rng.randint(0, 2))]
        rng.shuffle(predicted)
        rules = {"maskiou_resolution": rng.choice((64, 256)), "candidate_top_k": rng.choice((1, 2, 10))}
        yield "", given(predicted, truth, **rules)


def _shape(rng: random.Random) -> dict[str, Any]:
    left, top = rng.randint(0, 700), rng.randint(0, 700)
    width, height = rng.randint(40, 290), rng.randint(40, 290)
    if rng.random() < 0.3:
        middle = left + width // 2
        return {"geometry": "poly", "bins": [left, top + height, middle, top, left + width, top + height]}
    return box([left, top, left + width, top + height])


def _moved(rng: random.Random, shape: dict[str, Any]) -> dict[str, Any]:
    return shape | {"bins": [min(max(k + rng.randint(-25, 25), 0), 999) for k in shape["bins"]]}


def assign_inputs(rng: random.Random) -> Iterator[Given]:
    def given(ious: list[list[float]], candidates: list[list[bool]] | None = None, **rules: Any) -> dict[str, Any]:
        everything = [[True] * len(row) for row in ious]
        return {"ious": ious, "candidates": candidates or everything, "rules": RULES | rules}

    yield "the greedy choice is not the cheapest", given([[0.9, 0.8], [0.85, 0.1]], maskiou_gate=0.0)
    yield "all equal: in order", given([[0.5, 0.5], [0.5, 0.5]])
    yield "exactly the gate", given([[0.3]])
    yield "just under the gate", given([[0.2999999]])
    yield "no candidate", given([[0.9]], [[False]])
    yield "as dear as leaving both alone", given([[0.5]], fp_cost=0.25, fn_cost=0.25)
    yield "more predictions than objects", given([[0.6], [0.7], [0.7]])
    for _ in range(18):
        num_predicted, num_truth = rng.randint(1, 4), rng.randint(1, 4)
        ious = [
            [rng.choice((0.0, 0.25, 0.5, 0.75, 1.0, rng.random())) for _ in range(num_truth)]
            for _ in range(num_predicted)
        ]
        candidates = [[rng.random() < 0.8 for _ in row] for row in ious]
        yield "", given(ious, candidates, fp_cost=rng.choice((0.2, 1.0)), fn_cost=rng.choice((0.2, 1.0)))


def pack_inputs(rng: random.Random) -> Iterator[Given]:
    def given(lengths: list[int], capacity: int, num_rows: int | None = None, max_waiting: int = 512) -> dict[str, Any]:
        return {"lengths": lengths, "capacity": capacity, "num_rows": num_rows, "max_waiting": max_waiting}

    yield "nothing", given([], 10)
    yield "a gap that is filled exactly", given([5, 3, 2, 2, 7], 7)
    yield "the fullest row, not the first that fits", given([4, 5, 3, 3], 10)
    yield "equal sums: the older ones", given([6, 2, 2, 4, 2], 10)
    yield "as long as a row", given([10, 1, 10], 10)
    yield "longer than a row", given([3, 11], 10)
    yield "more than may wait", given([1, 1, 1], 10, max_waiting=2)
    yield "the youngest are kept for the rows to follow", given([2, 2, 2, 2], 10, num_rows=3)
    yield "fewer segments than rows", given([2, 2], 10, num_rows=3)
    for _ in range(16):
        capacity = rng.choice((16, 100, 1000))
        lengths = [rng.randint(1, capacity) for _ in range(rng.randint(1, 12))]
        yield "", given(lengths, capacity, rng.choice((None, rng.randint(1, len(lengths)))))


def groups_inputs(rng: random.Random) -> Iterator[Given]:
    yield "nothing", {"samples": [], "num_generations": 4}
    yield "a sample twice", {"samples": [3, 3], "num_generations": 2}
    for _ in range(8):
        samples = [rng.randint(0, 99) for _ in range(rng.randint(1, 5))]
        yield "", {"samples": samples, "num_generations": rng.randint(1, 6)}


def siblings_inputs(rng: random.Random) -> Iterator[Given]:
    for siblings in ("none", "prompt", "all"):
        for number in range(6):
            ranks = [[_response(rng) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 3))]
            returns = [round(rng.random(), 3) for _ in range(9)]
            shows = f"siblings: {siblings}" if not number else ""
            num = rng.choice((1, 3, 9))
            yield shows, {
                "siblings": siblings, "num_continuations": num, "continuation_returns": returns, "ranks": ranks
            }  # fmt: skip


def _response(rng: random.Random) -> dict[str, Any]:
    """Few tokens and samples, so that responses share states."""
    ids = [rng.choice((7, 8)) for _ in range(rng.randint(2, 5))]
    cuts = [0, *sorted(rng.sample(range(1, len(ids)), rng.randint(0, min(2, len(ids) - 1)))), len(ids)]
    return {"sample": rng.choice((0, 0, 1)), "ids": ids, "cuts": cuts, "reward": rng.choice((0.0, 0.5, 1.0))}


def chunks_inputs(rng: random.Random) -> Iterator[Given]:
    def given(num_requests: int, num_servers: int, pieces: int = 1) -> dict[str, Any]:
        return {"num_requests": num_requests, "num_servers": num_servers, "pieces": pieces}

    yield "nothing", given(0, 3)
    yield "four requests, three servers", given(4, 3)
    yield "seven requests, three servers", given(7, 3)
    yield "fewer requests than servers", given(1, 3)
    yield "as many for each server", given(6, 2)
    yield "pieces", given(16, 2, 4)
    yield "more pieces than requests", given(3, 2, 8)
    for _ in range(16):
        num_requests = rng.randint(1, 9) * rng.randint(1, 5)
        yield "", given(num_requests, rng.randint(1, 6), rng.choice((1, 1, 2, 4)))


def buckets_inputs(rng: random.Random) -> Iterator[Given]:
    def given(tensors: list[tuple[str, list[int]]], bucket_bytes: int, tail: int = 0, in_order: bool = False) -> Any:
        listed = [{"name": f"t{i}", "dtype": dtype, "shape": shape} for i, (dtype, shape) in enumerate(tensors)]
        return {"tensors": listed, "bucket_bytes": bucket_bytes, "tail_bytes": tail, "in_order": in_order}

    yield "nothing", given([], 100)
    yield "one type after the other", given([("float32", [2]), ("bfloat16", [3]), ("float32", [1])], 100)
    yield "exactly full", given([("int8", [50]), ("int8", [50]), ("int8", [1])], 100)
    yield "larger than a bucket", given([("int8", [10]), ("int8", [500]), ("int8", [10])], 100)
    yield "a scalar has one element", given([("float32", []), ("float32", [0, 4])], 4)
    yield "a tail", given([("int8", [size]) for size in (2, 5, 9, 1)], 100, 4)
    yield "a tail that takes all", given([("int8", [size]) for size in (2, 1)], 100, 50)
    yield "in the learner's order", given([("int8", [2]), ("float32", [3]), ("int8", [9])], 100, 4, True)
    for _ in range(16):
        dtypes = rng.sample(("float32", "bfloat16", "float16", "int8", "float8_e4m3fn"), 2)
        tensors = [
            (rng.choice(dtypes), [rng.randint(1, 12) for _ in range(rng.randint(1, 3))])
            for _ in range(rng.randint(1, 9))
        ]
        yield "", given(tensors, rng.choice((64, 256, 1024)), rng.choice((0, 0, 128)), rng.random() < 0.2)


def seeds_inputs(rng: random.Random) -> Iterator[Given]:
    def given(run_seed: int, step: int, rank: int, num: int = 8) -> dict[str, Any]:
        return {"run_seed": run_seed, "step": step, "rank": rank, "num_requests": num}

    yield "all zero", given(0, 0, 0)
    yield "no request", given(7, 0, 0, 0)
    yield "another step", given(7, 1, 0)
    yield "another rank", given(7, 0, 1)
    yield "step and rank are not interchangeable", given(7, 1, 2)
    yield "a run's seed of more than 32 bits", given(2**40 + 3, 5, 0)
    for _ in range(8):
        yield "", given(rng.randint(0, 2**31), rng.randint(0, 10**5), rng.randint(0, 63))


def advantages_inputs(rng: random.Random) -> Iterator[Given]:
    def given(groups: list[list[float | None]], baseline: str = "mean", scale: str = "group") -> dict[str, Any]:
        return {"groups": groups, "baseline": baseline, "scale": scale}

    for scale in ("group", "batch", "none"):
        yield f"scale {scale}", given([[1, 0, 0, 1], [0, 0, 0, 1]], scale=scale)
        yield "against the others of the group", given([[3, 0, 1]], "leave_one_out", scale)
        yield "equal rewards", given([[0.1, 0.1, 0.1], [1, 0, 0]], scale=scale)
        yield "a completion without a reward", given([[1, None, 0], [None, None], [2, None]], scale=scale)
    for _ in range(12):
        size = rng.randint(2, 6)
        groups = [[_reward(rng) for _ in range(size)] for _ in range(rng.randint(1, 4))]
        yield "", given(groups, rng.choice(("mean", "leave_one_out")), rng.choice(("group", "batch", "none")))


def _reward(rng: random.Random) -> float | None:
    return None if rng.random() < 0.1 else rng.choice((0.0, 1.0, round(rng.gauss(0, 3), 4)))


INPUTS = {
    "parse": parse_inputs, "match": match_inputs, "assign": assign_inputs, "append": append_inputs,
    "pack": pack_inputs, "groups": groups_inputs, "siblings": siblings_inputs, "chunks": chunks_inputs,
    "buckets": buckets_inputs, "seeds": seeds_inputs, "advantages": advantages_inputs,
}  # fmt: skip
