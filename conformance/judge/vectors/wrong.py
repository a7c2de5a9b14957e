"""Answers to vectors that are the reference's, but for one mistake."""

import random
from collections.abc import Callable, Mapping
from math import sqrt
from statistics import fmean
from typing import Any
from unittest import mock

from rollmatch.interop import vector_answers
from rollmatch.interop.vector_answers import CASES

Fields = dict[str, Any]


def keeps_the_cut_token(given: Fields) -> Fields:
    right = CASES["parse"](given)
    is_cut = bool(right["cut_head"]) and not right["invalid"]
    return {**right, "num_kept": right["num_kept"] + 1, "cut_head": ""} if is_cut else {**right}


def reads_on_after_the_stop_token(given: Fields) -> Fields:
    return {**CASES["parse"](given | {"tokens": [token for token in given["tokens"] if "control" not in token]})}


def calls_truncation_malformed(given: Fields) -> Fields:
    right = CASES["parse"](given)
    is_wrong = right["truncated"] and not right["invalid"]
    return {**right, "truncated": False, "drops": {**right["drops"], "malformed": 1}} if is_wrong else {**right}


def compares_boxes(given: Fields) -> Fields:
    def as_box(shape: Fields) -> Fields:
        xs, ys = shape["bins"][0::2], shape["bins"][1::2]
        return {"geometry": "bbox_2d", "bins": [min(xs), min(ys), max(xs), max(ys)]}

    return {**CASES["match"](given | {name: [as_box(one) for one in given[name]] for name in ("predicted", "truth")})}


def matches_greedily(given: Fields) -> Fields:
    ious, gate = given["ious"], given["rules"]["maskiou_gate"]
    pairs: list[tuple[int, int]] = []
    for row, values in enumerate(ious):
        free = [column for column in range(len(values)) if column not in [c for _, c in pairs]]
        best = max(free, key=lambda column: values[column], default=None)
        if best is not None and values[best] >= gate and given["candidates"][row][best]:
            pairs.append((row, best))
    rows, columns = [row for row, _ in pairs], [column for _, column in pairs]
    return {
        **CASES["assign"](given), "pairs": pairs, "ious": [ious[row][column] for row, column in pairs],
        "false_positives": [row for row in range(len(ious)) if row not in rows],
        "false_negatives": [column for column in range(len(ious[0])) if column not in columns],
    }  # fmt: skip


def passes_above_the_gate_only(given: Fields) -> Fields:
    rules = given["rules"]
    return {**CASES["assign"](given | {"rules": rules | {"maskiou_gate": rules["maskiou_gate"] + 1e-12}})}


def writes_a_comma_always(given: Fields) -> Fields:
    return {**CASES["append"](given | {"num_elements": max(1, given["num_elements"])})}


def counts_characters(given: Fields) -> Fields:
    right = CASES["append"](given)
    return {**right, "num_tokens": len(right["text"]) + 1} if "text" in right else {**right}


def packs_what_fits_first(given: Fields) -> Fields:
    def first_fit(lengths: list[int], *, capacity: int) -> tuple[int, ...]:
        chosen: list[int] = []
        for place, length in enumerate(lengths):
            if length + sum(lengths[one] for one in chosen) <= capacity:
                chosen.append(place)
        return tuple(chosen)

    with mock.patch("rollmatch.learn.pack.fullest_subset", first_fit):
        return {**CASES["pack"](given)}


def leaves_later_rows_empty(given: Fields) -> Fields:
    pop_row = vector_answers.Packer.pop_row
    with mock.patch.object(vector_answers.Packer, "pop_row", lambda packer, rows_to_follow: pop_row(packer)):
        return {**CASES["pack"](given)}


def repeats_the_list(given: Fields) -> Fields:
    return {**CASES["groups"](given), "requests": given["samples"] * given["num_generations"]}


def counts_itself(given: Fields) -> Fields:
    right = CASES["siblings"](given)
    values = [
        [[fmean([value] * count + [one["reward"]]) for value, count in zip(*both, strict=True)]
         for one, *both in zip(*rank, strict=True)]
        for rank in zip(given["ranks"], right["values"], right["counts"], strict=True)
    ]  # fmt: skip
    return {**right, "values": values}


def knows_its_own_process_only(given: Fields) -> Fields:
    parts = [CASES["siblings"](given | {"ranks": [rank]}) for rank in given["ranks"]]
    joined = {name: [part[name][0] for part in parts] for name in ("values", "counts")}
    return {**joined, "fresh": sorted(entry for part in parts for entry in part["fresh"])}


def spreads_evenly(given: Fields) -> Fields:
    num, servers = given["num_requests"], given["num_servers"]
    bounds = [round(num * server / servers) for server in range(servers + 1)]
    calls = [{"server": s, "start": bounds[s], "stop": bounds[s + 1]} for s in range(servers)]
    return {"calls": [call for call in calls if call["stop"] > call["start"]]}


def ignores_the_pieces(given: Fields) -> Fields:
    return {**CASES["chunks"](given | {"pieces": 1})}


def exceeds_the_bucket(given: Fields) -> Fields:
    return {**CASES["buckets"](given | {"bucket_bytes": given["bucket_bytes"] + 1})}


def mixes_types(given: Fields) -> Fields:
    return {**CASES["buckets"](given | {"in_order": True})}


def swaps_step_and_rank(given: Fields) -> Fields:
    return {**CASES["seeds"](given | {"step": given["rank"], "rank": given["step"]})}


def draws_from_one_stream(given: Fields) -> Fields:
    stream = random.Random(f"{given['run_seed']} {given['step']} {given['rank']}")
    return {"seeds": [stream.randint(1, 2**31 - 1) for _ in range(given["num_requests"])]}


def divides_by_the_population(given: Fields) -> Fields:
    def deviation(values: list[float]) -> float:
        mean = fmean(values) if values else 0.0
        return sqrt(sum((value - mean) ** 2 for value in values) / max(len(values), 1))

    with mock.patch("rollmatch.objectives.grpo.advantage._std", deviation):
        return {**CASES["advantages"](given)}


def forgets_the_floor(given: Fields) -> Fields:
    with mock.patch("rollmatch.objectives.grpo.advantage.STD_FLOOR", 1e-8):
        return {**CASES["advantages"](given)}


def scales_by_the_group_always(given: Fields) -> Fields:
    return {**CASES["advantages"](given | {"scale": given["scale"].replace("batch", "group")})}


def counts_a_missing_reward_as_0(given: Fields) -> Fields:
    return {**CASES["advantages"](given | {"groups": [[reward or 0 for reward in group] for group in given["groups"]]})}


MISTAKES: Mapping[str, tuple[Callable[[Fields], Fields], ...]] = {
    "parse": (keeps_the_cut_token, reads_on_after_the_stop_token, calls_truncation_malformed),
    "match": (compares_boxes,),
    "assign": (matches_greedily, passes_above_the_gate_only),
    "append": (writes_a_comma_always, counts_characters),
    "pack": (packs_what_fits_first, leaves_later_rows_empty),
    "groups": (repeats_the_list,),
    "siblings": (counts_itself, knows_its_own_process_only),
    "chunks": (spreads_evenly, ignores_the_pieces),
    "buckets": (exceeds_the_bucket, mixes_types),
    "seeds": (swaps_step_and_rank, draws_from_one_stream),
    "advantages": (
        divides_by_the_population, forgets_the_floor, scales_by_the_group_always, counts_a_missing_reward_as_0,
    ),
}  # fmt: skip
CASE_OF = {mistake.__name__: (case, mistake) for case, mistakes in MISTAKES.items() for mistake in mistakes}
