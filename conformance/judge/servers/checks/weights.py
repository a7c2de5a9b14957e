"""Served weights after updates."""

import math

from conformance.judge.servers.check import QUEUED, SHOULD, check
from conformance.judge.servers.checks import calls
from conformance.judge.servers.checks.generation import QUESTIONS, ids_of, read, same_but_stop
from conformance.judge.servers.checks.liveness import LONG
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.peers import BESIDE_EMBEDDINGS, halves, open_peer, sync
from conformance.judge.servers.talk import Talk

NEEDS = ("model", "group")
MAX_TOKENS = 16
LONG_QUESTION = "List every digit with its box, from top to bottom. " * 20
"""Over more than one block of the engine's cache (128 tokens on a CPU)."""


def write(talk: Talk, label: str, questions: tuple[str, ...] = QUESTIONS) -> None:
    """Greedily."""
    talk.generate(label, questions, max_tokens=MAX_TOKENS)


def expect(talk: Talk, label: str, number: int, questions: tuple[str, ...] = QUESTIONS) -> None:
    """Note what the call of this label must have written if it was policy ``number``."""
    call = talk.exchange.one(label)
    if call.is_ok:
        scorer, came = talk.subject.policies.scorer, talk.subject.dialect.read(call)
        talk.note(f"{label}-{number}", [scorer.greedy(number, one.prompt_ids, one.ids, MAX_TOKENS) for one in came])


def ask_next(talk: Talk) -> None:
    """Whether a whole update works after one that did not."""
    talk.exchange.calls.append(RecordedCall(label="-- next", method="-", path="-", status=200))
    sync(talk, BESIDE_EMBEDDINGS)
    write(talk, "new")
    expect(talk, "new", BESIDE_EMBEDDINGS)


def was(exchange: Exchange, label: str, number: int | None = None) -> bool:
    """Whether the call's responses are those of policy ``number``, or of the only one that was noted."""
    if number is None:
        [number] = [int(name.rpartition("-")[2]) for name in exchange.notes if name.startswith(f"{label}-")]
    return same_but_stop(ids_of(exchange, label), exchange.notes[f"{label}-{number}"])


def judge_ok(exchange: Exchange, *labels: tuple[str, int | None]) -> str:
    wrong = [f"{label} is not what its policy writes" for label, number in labels if not was(exchange, label, number)]
    failed = [call.summary() for call in exchange.calls if not call.is_ok and not call.label.startswith("close")]
    return "; ".join(failed + wrong)


def ask_same(talk: Talk) -> None:
    peer = sync(talk, 0)
    write(talk, "before")
    sync(talk, 0, peer=peer)
    write(talk, "after")


@check(
    "same-weights-same-responses",
    "An update with the current weights MUST change nothing.",
    clause="servers/what-was-sent-is-what-is-served#1",
    ask=ask_same,
    needs=NEEDS,
    deadline_s=120,
)
def judge_same(exchange: Exchange) -> str:
    return "" if ids_of(exchange, "before") == ids_of(exchange, "after") else "the same weights write something else"


def ask_new(talk: Talk) -> None:
    sync(talk, 1)
    write(talk, "new")
    for number in (0, 1):
        expect(talk, "new", number)


@check(
    "new-weights-are-served",
    "After an update, greedy responses MUST equal those of transformers with the new weights, token by token.",
    clause="servers/what-was-sent-is-what-is-served#2",
    ask=ask_new,
    needs=NEEDS,
    deadline_s=120,
)
def judge_new(exchange: Exchange) -> str:
    if exchange.notes["new-0"] == exchange.notes["new-1"]:
        return "the two policies write the same, so that nothing was seen"
    if was(exchange, "new", 0):
        return "the old weights are still served, although all calls went well"
    return judge_ok(exchange, ("new", 1))


def ask_back(talk: Talk) -> None:
    peer = sync(talk, 1)
    write(talk, "new")
    expect(talk, "new", 1)
    sync(talk, 0, peer=peer)
    write(talk, "old")
    expect(talk, "old", 0)


@check(
    "old-weights-come-back",
    "A second update with the first weights MUST restore their responses.",
    clause="servers/what-was-sent-is-what-is-served#3",
    ask=ask_back,
    needs=NEEDS,
    requires=("new-weights-are-served",),
    deadline_s=120,
)
def judge_back(exchange: Exchange) -> str:
    return judge_ok(exchange, ("new", 1), ("old", 0))


def ask_half(talk: Talk) -> None:
    peer = sync(talk, 0)
    first, second = halves(talk.subject.policies.weights(1))
    peer.send(first)
    write(talk, "between")
    for number in (0, 1):
        expect(talk, "between", number)
    peer.send(second)
    peer.finish()
    write(talk, "new")
    expect(talk, "new", 1)


@check(
    "no-half-update-is-served",
    "Between two parts of an update, calls SHOULD use the old weights or the new ones, or be rejected.",
    clause="servers/what-was-sent-is-what-is-served#6",
    grade=SHOULD,
    dialects=QUEUED,
    ask=ask_half,
    needs=NEEDS,
    requires=("new-weights-are-served",),
    deadline_s=120,
)
def judge_half(exchange: Exchange) -> str:
    between = exchange.one("between")
    if not between.is_refusal and not (was(exchange, "between", 0) or was(exchange, "between", 1)):
        return "half of the new weights are served together with half of the old ones"
    return "" if was(exchange, "new", 1) else "after the second half, the new weights are not served"


def ask_incomplete(talk: Talk) -> None:
    peer = sync(talk, 0)
    talk.exchange.calls.clear()
    peer.send(halves(talk.subject.policies.weights(1))[0])
    peer.finish()
    write(talk, "after")
    expect(talk, "after", 0)
    sync(talk, 0, peer=peer)


@check(
    "an-incomplete-update-is-rejected",
    "An update with missing tensors SHOULD be rejected when it ends, and the old weights are still served.",
    clause="servers/a-wrong-update-is-an-error-and-the-next-one-works#6",
    grade=SHOULD,
    dialects=("swift", "trl", "vllm"),
    ask=ask_incomplete,
    needs=NEEDS,
    deadline_s=120,
    is_dangerous=True,
    requires=("new-weights-are-served", "no-half-update-is-served"),
)
def judge_incomplete(exchange: Exchange) -> str:
    is_refused = any(call.is_refusal for call in exchange.calls if call.label.startswith(("end", "finish", "update")))
    if not is_refused:
        return "an update that leaves out half of the tensors is not refused"
    return "" if was(exchange, "after", 0) else "and the old weights are not served any more"


def ask_cold(talk: Talk) -> None:
    peer = sync(talk, 0)
    write(talk, "filled", (LONG_QUESTION,))
    sync(talk, 1, peer=peer)
    write(talk, "new", (LONG_QUESTION,))
    for number in (0, 1):
        expect(talk, "new", number, (LONG_QUESTION,))


@check(
    "caches-forget-old-weights",
    "After an update, a long prompt that was seen before MUST be generated with the new weights only (no stale cache).",
    clause="servers/what-was-sent-is-what-is-served#7",
    ask=ask_cold,
    needs=NEEDS,
    requires=("new-weights-are-served",),
    deadline_s=120,
)
def judge_cold(exchange: Exchange) -> str:
    if exchange.notes["new-0"] == exchange.notes["new-1"]:
        return "the two policies write the same, so that nothing was seen"
    return judge_ok(exchange, ("new", 1))


def ask_reset(talk: Talk) -> None:
    path = "/reset_prefix_cache" + "/" * (talk.subject.dialect.family != "vllm")
    talk.post("reset", path)


@check(
    "a-reset-returns-its-success",
    "A reset of the prefix cache SHOULD return a boolean for success.",
    clause="servers/what-was-sent-is-what-is-served#9",
    grade=SHOULD,
    dialects=("swift", "trl", "vllm"),
    ask=ask_reset,
    needs=("group",),
)
def judge_reset(exchange: Exchange) -> str:
    call = exchange.one("reset")
    has_flag = isinstance(call.reply, dict) and any(isinstance(value, bool) for value in call.reply.values())
    return "" if call.is_ok and has_flag else f"success is not a boolean: {call.summary()}"


def ask_in_flight(talk: Talk) -> None:
    """A whole update while long responses are written; for a stock vLLM within ``/pause`` and ``/resume``."""
    peer = open_peer(talk)
    sync(talk, 0, peer=peer)
    running = calls.begin_long(talk, "running", QUESTIONS, **LONG | {"timeout_s": 90})
    sync(talk, BESIDE_EMBEDDINGS, peer=peer)
    running.result()
    write(talk, "new")
    expect(talk, "new", BESIDE_EMBEDDINGS)


@check(
    "running-calls-survive-an-update",
    "An update during long responses MUST fail no call, and is served afterwards.",
    clause="servers/what-was-sent-is-what-is-served#10",
    ask=ask_in_flight,
    needs=NEEDS,
    deadline_s=150,
    is_dangerous=True,
    requires=("new-weights-are-served",),
)
def judge_in_flight(exchange: Exchange) -> str:
    return judge_ok(exchange, ("new", None))


def ask_finite(talk: Talk) -> None:
    sync(talk, 1)
    talk.generate("new", QUESTIONS, max_tokens=MAX_TOKENS, logprobs=True)


@check(
    "logprobs-stay-finite",
    "After an update, all log-probabilities MUST be finite.",
    clause="servers/what-was-sent-is-what-is-served#5",
    ask=ask_finite,
    needs=NEEDS,
    requires=("logprobs-fit-the-ids",),
    deadline_s=90,
)
def judge_finite(exchange: Exchange) -> str:
    values = [value for one in read(exchange, "new") for value in one.logprobs or [math.nan]]
    return "" if all(map(math.isfinite, values)) else "log-probabilities are not finite after an update"


def ask_small(talk: Talk) -> None:
    """One tensor a call."""
    peer, weights = open_peer(talk), talk.subject.policies.weights(BESIDE_EMBEDDINGS)
    peer.send(weights, per_call=1)
    peer.finish()
    write(talk, "new")
    expect(talk, "new", BESIDE_EMBEDDINGS)


@check(
    "an-update-may-come-in-small-parts",
    "An update in calls of one tensor each MUST be served as a whole one.",
    clause="servers/what-was-sent-is-what-is-served#12",
    ask=ask_small,
    since="2026-11-27",
    dialects=("swift", "vllm"),
    needs=NEEDS,
    deadline_s=120,
    requires=("new-weights-are-served",),
)
def judge_small(exchange: Exchange) -> str:
    return judge_ok(exchange, ("new", None))
