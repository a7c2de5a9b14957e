"""Updates, tensor by tensor: each one must show in a log-probability."""

from collections.abc import Sequence
from typing import Any

from conformance.servers.check import check
from conformance.servers.checks.numeric import ADDED, compare, judge_rows
from conformance.servers.checks.weights import NEEDS
from conformance.servers.exchange import Exchange
from conformance.servers.numbers import EVERY_TENSOR, TOLERANCE, distance, off
from conformance.servers.peers import open_peer, sync
from conformance.servers.pictures import CACHED, picture
from conformance.servers.talk import Talk

NUM_IDS = 12


def ask_every(talk: Talk) -> None:
    scorer = talk.subject.policies.scorer
    scorer.weights_that_show()
    talk.note("hidden", scorer.hidden_names)
    peer = sync(talk, EVERY_TENSOR)
    for place, probe in enumerate(scorer.probes):
        label = f"new-{place}"
        talk.generate(label, [probe], max_tokens=NUM_IDS, logprobs=True)
        if off(compare(talk, label, [probe], number=EVERY_TENSOR)):
            talk.note("culprit", culprit(talk, label, place))
            break
    talk.note("num", len(scorer.probes))
    sync(talk, 0, peer=peer)


def culprit(talk: Talk, label: str, place: int) -> list[str]:
    """Which tensors, left as they were, explain what came back: one, or all below one name; none if nothing does."""
    scorer = talk.subject.policies.scorer
    [one] = talk.subject.dialect.read(talk.exchange.one(label))
    for names in groups(list(talk.subject.policies.weights(0))):
        expected = scorer.without(names, scorer.probes[place], one.ids)
        if distance(one.logprobs or [], expected) <= TOLERANCE:
            return names
    return []


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
    "transformers, within 0.001, where leaving out any single tensor would show.",
    clause="servers/what-was-sent-is-what-is-served#4",
    ask=ask_every,
    since=ADDED,
    needs=NEEDS,
    deadline_s=240,
    requires=("pictures-are-seen", "logprobs-stay-finite", "new-weights-are-served"),
)
def judge_every(exchange: Exchange) -> str:
    if hidden := exchange.notes["hidden"]:
        return f"{len(hidden)} tensors show in no response, so that nothing was seen of them: {hidden[:3]}"
    names = exchange.notes.get("culprit", [])
    if names:
        shown = names[0] if len(names) == 1 else f"{len(names)} tensors from {names[0]} to {names[-1]}"
        return f"responses are those of weights in which the update left out {shown}"
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
    requires=("every-tensor-is-updated",),
)
def judge_cached_picture(exchange: Exchange) -> str:
    return judge_rows(exchange, "old", "new")
