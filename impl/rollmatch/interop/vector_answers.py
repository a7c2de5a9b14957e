"""Answers of this implementation to portable vectors: inputs and outputs are those of ``docs/reference/vectors.md``."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollmatch.data import Reuse
from rollmatch.environments.continuation import Waves
from rollmatch.environments.trajectory import State, Trajectory
from rollmatch.errors import RollmatchError
from rollmatch.learn.pack import Packer
from rollmatch.model.vocabulary import Vocabulary, coord_token
from rollmatch.objectives.grpo.advantage import group_advantages
from rollmatch.objectives.rollout_matching.answer_format import ANSWER_FORMATS, AnswerFormat
from rollmatch.objectives.rollout_matching.match import MatchRules, PairScores, match_objects
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.target import append_missed
from rollmatch.objectives.vineppo.value import ContinuationValues, ValueRules, passages_of
from rollmatch.records import NUM_BINS, Geometry, GroundTruth, Matching, ParsedRollout, PredictedObject, Sample, Segment
from rollmatch.rollout.backend import derive_seed
from rollmatch.rollout.work_items import cut_work_items

Fields = Mapping[str, Any]
"""A JSON object."""
_SAMPLE = Sample(sample_id=0, origin="vector", images=())


class ListedVocabulary(Vocabulary):
    """The tokens of one vector; a token's id is its place in the list."""

    def __init__(self, tokens: Sequence[Any]) -> None:
        self._pieces = {place: _piece_of(token) for place, token in enumerate(tokens)}
        named = [(place, token) for place, token in enumerate(tokens) if isinstance(token, dict)]
        self._bins = {place: token["coord"] for place, token in named if "coord" in token}
        self.control_ids = frozenset(place for place, token in named if "control" in token)


def _piece_of(token: Any) -> bytes:
    if isinstance(token, str):
        return token.encode()
    if "hex" in token:
        return bytes.fromhex(token["hex"])
    return (coord_token(token["coord"]) if "coord" in token else str(token["control"])).encode()


def byte_vocabulary() -> Vocabulary:
    """One token per byte, one per coordinate, and the stop token."""
    alphabet = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    literals = ["<|im_end|>", *(coord_token(place) for place in range(NUM_BINS))]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in literals])
    return Vocabulary(tokenizer, stop_token="<|im_end|>")


def _format_of(fields: Fields) -> AnswerFormat:
    answer_format = ANSWER_FORMATS[fields["format"]]
    return answer_format.fitted(*fields["image"]) if "image" in fields else answer_format


def parse(fields: Fields) -> Fields:
    """Case ``parse``."""
    parsed = parse_rollout(range(len(fields["tokens"])), ListedVocabulary(fields["tokens"]), _format_of(fields))
    return {
        "num_kept": len(parsed.prefix_token_ids),
        "cut_head": parsed.cut_head.hex(),
        "num_elements": parsed.num_elements,
        "objects": [
            {"desc": one.desc, "geometry": one.geometry.value, "bins": one.bins, "positions": one.positions}
            for one in parsed.objects
        ],
        "drops": parsed.drops,
        "truncated": parsed.truncated,
        "invalid": parsed.invalid,
    }


def _truth(fields: Fields) -> GroundTruth:
    return GroundTruth(desc=fields.get("desc", ""), geometry=Geometry(fields["geometry"]), bins=tuple(fields["bins"]))


def _predicted(fields: Fields) -> PredictedObject:
    bins = tuple(fields["bins"])
    return PredictedObject(desc="", geometry=Geometry(fields["geometry"]), bins=bins, positions=(0,) * len(bins))


def _matching(found: Matching) -> Fields:
    names = ("pairs", "ious", "false_positives", "false_negatives", "gating_rejections")
    return {name: getattr(found, name) for name in names}


def match(fields: Fields) -> Fields:
    """Case ``match``."""
    predicted, truth = [_predicted(one) for one in fields["predicted"]], [_truth(one) for one in fields["truth"]]
    return _matching(match_objects(predicted, truth, MatchRules(**fields["rules"])))


def assign(fields: Fields) -> Fields:
    """Case ``assign``: scores instead of shapes."""
    scores = PairScores(np.array(fields["candidates"], dtype=bool), np.array(fields["ious"], dtype=np.float64))
    box = {"geometry": Geometry.BBOX, "bins": (0, 0, 1, 1)}
    num_predicted, num_truth = scores.ious.shape
    return _matching(
        match_objects(
            [_predicted(box)] * num_predicted, [_truth(box)] * num_truth, MatchRules(**fields["rules"]), scores
        )
    )


def append(fields: Fields) -> Fields:
    """Case ``append``."""
    parsed = ParsedRollout(
        prefix_token_ids=(), cut_head=bytes.fromhex(fields["cut_head"]), prefix_text="",
        num_elements=fields["num_elements"], objects=(), drops={}, truncated=False, invalid=False,
    )  # fmt: skip
    missed = [_truth(one) for one in fields["missed"]]
    tail = append_missed(parsed, missed, byte_vocabulary(), _format_of(fields))
    return {"text": tail.text, "num_tokens": len(tail.token_ids), "desc_positions": tail.desc_positions}


def pack(fields: Fields) -> Fields:
    """Case ``pack``; a segment's first token is its index."""
    lengths, num_rows = fields["lengths"], fields["num_rows"]
    packer = Packer(fields["capacity"], max_buffered=fields["max_waiting"])
    packer.add(
        Segment(sample=_SAMPLE, policy_version=1, token_ids=(place,) * length, prompt_len=0, prefix_len=0)
        for place, length in enumerate(lengths)
    )
    rows: list[list[int]] = []
    while packer.buffered if num_rows is None else len(rows) < num_rows:
        left = 0 if num_rows is None else num_rows - len(rows) - 1
        rows.append([segment.token_ids[0] for segment in packer.pop_row(rows_to_follow=left).segments])
    return {"rows": rows, "waiting": [segment.token_ids[0] for segment in packer.state()]}


def groups(fields: Fields) -> Fields:
    """Case ``groups``."""
    reuse = Reuse(num_rollouts=fields["num_generations"])
    requests = reuse.repeat(fields["samples"])
    return {"requests": requests, "groups": reuse.group(range(len(requests)))}


def siblings(fields: Fields) -> Fields:
    """Case ``siblings``: the values of all ranks' responses, and what has to be sampled for them."""
    by_rank = [[_trajectory(one) for one in responses] for responses in fields["ranks"]]
    cuts = [[tuple(one["cuts"]) for one in responses] for responses in fields["ranks"]]
    passages = [
        [p for index, (one, cut) in enumerate(zip(*rank_pair)) for p in passages_of((rank, index), one, cut)]
        for rank, rank_pair in enumerate(zip(by_rank, cuts))
    ]
    rules = ValueRules(num_continuations=fields["num_continuations"], siblings=fields["siblings"])
    wanted: dict[State, int] = {}
    returns, drawn = fields["continuation_returns"], {}

    def draw(needed: Mapping[State, int]) -> None:
        wanted.update(needed)
        for state, num in needed.items():
            drawn[state] = returns[:num]

    values, counts = [], []
    for rank, trajectories in enumerate(by_rank):
        ranks = SimpleNamespace(rank=rank, gather=lambda _: passages)
        waves = cast(Waves, SimpleNamespace(ranks=ranks, draw=draw, drawn=drawn))
        valued = ContinuationValues(rules).values_of(trajectories, cuts[rank], waves)
        values.append([one.values for one in valued])
        counts.append([one.counts for one in valued])
    fresh = sorted([state.sample_id, state.prefix_token_ids, num] for state, num in wanted.items() if num)
    return {"values": values, "counts": counts, "fresh": fresh}


def _trajectory(fields: Fields) -> Trajectory:
    ids = tuple(fields["ids"])
    sample = Sample(sample_id=fields["sample"], origin="vector", images=())
    return Trajectory(
        sample=sample,
        prompt_token_ids=(),
        token_ids=ids,
        rewards=((len(ids), fields["reward"]),),
        policy_version=1,
        is_finished=True,
    )


def chunks(fields: Fields) -> Fields:
    """Case ``chunks``."""
    items = cut_work_items(0, fields["num_requests"], fields["num_servers"], pieces=fields["pieces"], first=0)
    return {"calls": [{"server": one.server_index, "start": one.start, "stop": one.stop} for one in items]}


def buckets(fields: Fields) -> Fields:
    """Case ``buckets``."""
    from rollmatch.weights.plan import Spec, make_plan

    specs = [Spec(one["name"], one["dtype"], tuple(one["shape"])) for one in fields["tensors"]]
    limits = {name: fields[name] for name in ("bucket_bytes", "tail_bytes", "in_order")}
    plan = make_plan(specs, **limits)
    return {"order": plan.order, "buckets": [bucket._asdict() for bucket in plan.buckets]}


def seeds(fields: Fields) -> Fields:
    """Case ``seeds``."""
    place = {name: fields[name] for name in ("step", "rank")}
    return {"seeds": [derive_seed(fields["run_seed"], **place, index=index) for index in range(fields["num_requests"])]}


def advantages(fields: Fields) -> Fields:
    """Case ``advantages``."""
    return {"advantages": group_advantages(fields["groups"], baseline=fields["baseline"], scale=fields["scale"])}


CASES: Mapping[str, Callable[[Fields], Fields]] = {
    one.__name__: one
    for one in (parse, match, assign, append, pack, groups, siblings, chunks, buckets, seeds, advantages)
}


def answer(case: str, fields: Fields) -> Fields | None:
    """The output; a refused input has the code of its error, a case that is not known None."""
    if case not in CASES:
        return None
    try:
        return CASES[case](fields)
    except RollmatchError as error:
        return {"error": error.code}
