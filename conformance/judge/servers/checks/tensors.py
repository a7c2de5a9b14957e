"""Updates, tensor by tensor: each one must show in a log-probability."""

import math
from collections.abc import Sequence
from typing import Any

from conformance.judge.servers.check import check
from conformance.judge.servers.checks.numeric import ADDED, compare, judge_rows
from conformance.judge.servers.checks.weights import NEEDS
from conformance.judge.servers.exchange import Exchange
from conformance.judge.servers.numbers import EVERY_TENSOR, distance, seen
from conformance.judge.servers.peers import BESIDE_EMBEDDINGS, open_peer, sync
from conformance.judge.servers.pictures import CACHED, picture
from conformance.judge.servers.talk import Talk

NUM_IDS, NUM_TRIED = 48, 8
"""Ids of a response, and groups of tensors that are tried with every response: those that explain one of them best."""


def ask_every(talk: Talk) -> None:
    scorer = talk.subject.policies.scorer
    scorer.weights_that_show()
    peer = sync(talk, EVERY_TENSOR)
    for place, probe in enumerate(scorer.probes):
        talk.generate(f"new-{place}", [probe], max_tokens=NUM_IDS, logprobs=True)
        compare(talk, f"new-{place}", [probe], number=EVERY_TENSOR)
    talk.note("num", len(scorer.probes))
    talk.note("culprit", culprit(talk))
    sync(talk, 0, peer=peer)
    if scorer.hidden_names and not judge_every(talk.exchange):
        tolerance, hidden = talk.subject.tolerance, scorer.hidden_names
        hint = f"{len(hidden)} tensors show in no response, such as {hidden[0]}"
        talk.exchange.untestable = f"with --tolerance {tolerance:g}, {hint}"


def culprit(talk: Talk) -> list[str]:
    """Which tensors, left as they were, explain best what came back: one, or all below one name; none if none does."""
    scorer = talk.subject.policies.scorer
    calls = [talk.exchange.one(f"new-{place}") for place in range(len(scorer.probes))]
    rows = [row for place in range(len(scorer.probes)) for row in talk.exchange.notes[f"new-{place}"]]
    if len(rows) != len(calls) or any(math.isinf(distance(row["logprobs"] or [], row["expected"])) for row in rows):
        return []
    came = [talk.subject.dialect.read(call)[0].ids for call in calls]
    replied, whole = ([row[name] for row in rows] for name in ("logprobs", "expected"))
    tolerance = talk.subject.tolerance
    if 2 * apart(replied, whole) < seen(tolerance):
        return []  # nothing that shows is nearer

    def left_out(names: Sequence[str], each: int) -> list[float]:
        return scorer.without(names, scorer.probes[each], came[each])

    def is_it(names: Sequence[str]) -> bool:
        others = [left_out(names, each) for each in range(len(replied))]
        is_nearer = apart(replied, others) < apart(replied, whole) and apart(others, whole) >= seen(tolerance)
        return is_nearer and max(map(distance, replied, others)) <= tolerance

    found = groups(list(talk.subject.policies.weights(0)))
    place = max(range(len(replied)), key=lambda each: math.dist(replied[each], whole[each]))
    found.sort(key=lambda names: math.dist(replied[place], left_out(names, place)))
    return next(filter(is_it, found[:NUM_TRIED]), [])


def apart(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Root of the sum of squares of all differences.

    >>> apart([[0.0, 1.0], [2.0]], [[3.0, 1.0], [6.0]])
    5.0
    """
    return math.hypot(*map(math.dist, some, others))


def groups(names: Sequence[str]) -> list[list[str]]:
    """All tensors below each name, the largest first; each tensor alone at the end.

    >>> groups(["a.b.w", "a.b.v", "a.c"])
    [['a.b.w', 'a.b.v', 'a.c'], ['a.b.w', 'a.b.v'], ['a.b.w'], ['a.b.v'], ['a.c']]
    """
    below: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for end in range(len(parts)):
            below.setdefault(".".join(parts[: end + 1]), []).append(name)
    found = {tuple(group) for group in below.values()}
    return [list(group) for group in sorted(found, key=lambda group: (-len(group), names.index(group[0])))]


@check(
    "every-tensor-is-updated",
    "After an update of all tensors, log-probabilities of texts and pictures MUST be those of "
    "transformers, within the tolerance, where leaving out any single tensor would show.",
    clause="servers/what-was-sent-is-what-is-served#4",
    ask=ask_every,
    since=ADDED,
    needs=NEEDS,
    deadline_s=240,
    requires=("pictures-are-seen", "logprobs-stay-finite", "new-weights-are-served", "long-responses-stay-greedy"),
)
def judge_every(exchange: Exchange) -> str:
    names = exchange.notes.get("culprit", [])
    if names:
        shown = names[0] if len(names) == 1 else f"{len(names)} tensors from {names[0]} to {names[-1]}"
        return f"responses are those of weights in which the update left out {shown}"
    return judge_rows(exchange, *(f"new-{place}" for place in range(exchange.notes["num"])))


def ask_second(talk: Talk) -> None:
    """Loaders that store a tensor in another form, as those of experts do, may find it only the first time."""
    scorer = talk.subject.policies.scorer
    scorer.weights_that_show()
    peer = sync(talk, BESIDE_EMBEDDINGS)
    sync(talk, EVERY_TENSOR, peer=peer)
    for place, probe in enumerate(scorer.probes):
        talk.generate(f"new-{place}", [probe], max_tokens=NUM_IDS, logprobs=True)
        compare(talk, f"new-{place}", [probe], number=EVERY_TENSOR)
    talk.note("num", len(scorer.probes))
    sync(talk, 0, peer=peer)


@check(
    "a-second-update-is-as-exact",
    "After a second update of all tensors in one group, log-probabilities MUST be those of transformers, within the "
    "tolerance.",
    clause="servers/what-was-sent-is-what-is-served#15",
    ask=ask_second,
    since="2026-11-27",
    needs=NEEDS,
    deadline_s=240,
    requires=("every-tensor-is-updated", "old-weights-come-back"),
)
def judge_second(exchange: Exchange) -> str:
    return judge_rows(exchange, *(f"new-{place}" for place in range(exchange.notes["num"])))


def ask_cached_picture(talk: Talk) -> None:
    scorer, probe = talk.subject.policies.scorer, talk.subject.prompt("What is this?", picture(CACHED))
    scorer.weights_that_show()
    peer: Any = open_peer(talk)
    for label, number in (("old", 0), ("new", EVERY_TENSOR)):
        sync(talk, number, peer=peer)
        talk.generate(label, [probe], max_tokens=NUM_IDS, logprobs=True)
        compare(talk, label, [probe], number=number)
    sync(talk, 0, peer=peer)


@check(
    "caches-forget-old-pictures",
    "After an update, a picture that was seen before MUST be read with the new weights (no stale cache "
    "of the encoder).",
    clause="servers/what-was-sent-is-what-is-served#8",
    ask=ask_cached_picture,
    since=ADDED,
    needs=(*NEEDS, "pictures"),
    deadline_s=240,
    requires=("every-tensor-is-updated", "a-second-update-is-as-exact"),
)
def judge_cached_picture(exchange: Exchange) -> str:
    return judge_rows(exchange, "old", "new")
