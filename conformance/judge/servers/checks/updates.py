"""Wrong updates: unknown tensors, shapes, types, order of calls."""

from itertools import takewhile
from typing import TYPE_CHECKING, Any

from conformance.judge.servers.check import SHOULD, check
from conformance.judge.servers.checks import calls
from conformance.judge.servers.checks.generation import QUESTIONS
from conformance.judge.servers.checks.liveness import LONG
from conformance.judge.servers.checks.weights import MAX_TOKENS, NEEDS, ask_next, expect, judge_ok, was, write
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.peers import BESIDE_EMBEDDINGS, make_peer, open_peer, sync
from conformance.judge.servers.talk import Stopped, Talk

if TYPE_CHECKING:
    from torch import Tensor

VERSION_FIELDS = ("weight_version", "policy_version")


def offer(talk: Talk, peer: Any, tensors: "dict[str, Tensor]", label: str) -> None:
    """Announce, and send what was announced unless it was refused; the server's answer stands under ``label``."""
    try:
        if talk.subject.dialect.family in ("vllm", "native"):
            peer.send(tensors, label)
            peer.finish()
        elif peer.announce(tensors, label).is_ok:
            peer.pass_on(next(iter(tensors.values())))
            peer.finish()
    except Stopped as stop:
        talk.note(f"{label}-stopped", str(stop))
        peer.finish()  # whatever happened, a learner lets generation continue


def answers(exchange: Exchange, label: str) -> list[RecordedCall]:
    """Calls that may report the refusal: the announcement, or one that ends the update."""
    return [call for call in exchange.calls if call.label == label or call.label.startswith(("end", "finish"))]


def ask_before(talk: Talk) -> None:
    name, tensor = _one(talk)
    peer = make_peer(talk)
    if talk.subject.dialect.family == "vllm":
        peer.begin()
        peer.announce({name: tensor}, "update").result()
        peer.finish()
    elif talk.subject.dialect.family == "native":
        body = peer.learner.announcement({name: tensor}, version=10**6, sync_id="x")
        talk.post("update", "/native/sync/", body)
    else:
        peer.announce({name: tensor}, "update")
    talk.generate("after", QUESTIONS[:1], timeout_s=20)
    talk.get("health", talk.subject.dialect.health_path, timeout_s=5)


@check(
    "update-without-group-is-refused",
    "An update without a communicator MUST return an error, and calls are still served.",
    clause="servers/a-wrong-update-is-an-error-and-the-next-one-works#1",
    ask=ask_before,
    needs=NEEDS,
    is_dangerous=True,
    deadline_s=90,
)
def judge_before(exchange: Exchange) -> str:
    update = exchange.one("update")
    is_refused = update.status is not None and update.status >= 400
    served = [call for call in (exchange.one("after"), exchange.one("health")) if not call.is_ok]
    return "; ".join(call.summary() for call in ([] if is_refused else [update]) + served)


def ask_unknown(talk: Talk) -> None:
    _ask_wrong(talk, {"model.no_such.weight": _one(talk)[1].new_zeros(4)})


def ask_shape(talk: Talk) -> None:
    name, tensor = _one(talk)
    _ask_wrong(talk, {name: tensor.new_zeros(tensor.shape[0] + 8, *tensor.shape[1:])})


def _ask_wrong(talk: Talk, tensors: "dict[str, Tensor]") -> None:
    """Then whether the old weights are still served, and if so, whether a whole update still works."""
    peer = sync(talk, 0)
    talk.exchange.calls.clear()
    offer(talk, peer, tensors, "update")
    write(talk, "after")
    expect(talk, "after", 0)
    peer.close()
    if talk.exchange.one("after").is_ok:  # what an engine that has died says to a learner is another thing each time
        ask_next(talk)


@check(
    "unknown-tensor-is-rejected",
    "An unknown tensor MUST return an error, the old weights are still served, and the next update works.",
    clause="servers/a-wrong-update-is-an-error-and-the-next-one-works#3",
    requires=("new-weights-are-served",),
    ask=ask_unknown,
    needs=NEEDS,
    is_dangerous=True,
    deadline_s=150,
)
@check(
    "wrong-shape-is-rejected",
    "A tensor of another shape MUST return an error, the old weights are still served, and the next update works.",
    clause="servers/a-wrong-update-is-an-error-and-the-next-one-works#2",
    requires=("wrong-shape-is-survived",),
    ask=ask_shape,
    needs=NEEDS,
    is_dangerous=True,
    deadline_s=150,
)
def judge_wrong(exchange: Exchange) -> str:
    """The error is returned; old weights are served; the next update works."""
    before = Exchange(calls=list(takewhile(lambda call: call.label != "-- next", exchange.calls)))
    if not any(call.status is not None and call.status >= 400 for call in answers(before, "update")):
        return f"the update is not refused: {before.one('update').summary()}"
    return judge_intact(exchange)


@check(
    "wrong-shape-is-survived",
    "After a tensor of another shape, with or without an error, old weights MUST be served, then those "
    "of the next update.",
    clause="servers/a-wrong-update-is-an-error-and-the-next-one-works#4",
    ask=ask_shape,
    needs=NEEDS,
    is_dangerous=True,
    deadline_s=150,
    requires=("new-weights-are-served",),
)
def judge_intact(exchange: Exchange) -> str:
    """Whatever it said."""
    if failed := exchange.unmet(ok=("after",)):
        return failed
    if not was(exchange, "after", 0):
        return "the old weights are not served any more"
    return judge_next(exchange)


def judge_next(exchange: Exchange) -> str:
    return "" if was(exchange, "new") else "the next update is not served"


def ask_cast(talk: Talk) -> None:
    name, tensor = _one(talk)
    peer = sync(talk, 0)
    offer(talk, peer, {name: tensor.bfloat16()}, "update")
    talk.generate("after", QUESTIONS[:1], max_tokens=MAX_TOKENS)
    peer.close()
    sync(talk, BESIDE_EMBEDDINGS)
    write(talk, "new")
    expect(talk, "new", BESIDE_EMBEDDINGS)


@check(
    "another-type-is-cast-or-refused",
    "A bfloat16 tensor for a float32 model SHOULD be cast or rejected, and the next update works.",
    clause="servers/a-wrong-update-is-an-error-and-the-next-one-works#5",
    grade=SHOULD,
    ask=ask_cast,
    needs=NEEDS,
    is_dangerous=True,
    deadline_s=150,
    requires=("new-weights-are-served",),
)
def judge_cast(exchange: Exchange) -> str:
    return judge_next(exchange) if exchange.one("after").is_ok else exchange.one("after").summary()


def ask_version(talk: Talk) -> None:
    path, _ = talk.subject.dialect.version_of_weights
    peer = open_peer(talk)
    for _ in range(3):
        sync(talk, 0, peer=peer)
        talk.get("version", path)


@check(
    "weight-version-grows",
    "The version of the weights SHOULD be readable, and increase with every update.",
    clause="servers/what-was-sent-is-what-is-served#11",
    grade=SHOULD,
    ask=ask_version,
    needs=NEEDS,
    deadline_s=120,
)
def judge_version(exchange: Exchange) -> str:
    values = [
        next((call.reply[name] for name in VERSION_FIELDS if name in call.reply), None)
        for call in exchange.all("version")
    ]
    if None in values:
        return "no route returns a version of the weights"
    numbers = [int(value) for value in values]
    return "" if numbers == sorted(set(numbers)) else f"versions do not grow: {numbers}"


def ask_order(talk: Talk) -> None:
    peer = open_peer(talk)
    talk.post("finish-first", peer.ending)
    talk.post("start", peer.beginning)
    talk.post("start-again", peer.beginning)
    talk.get("health", talk.subject.dialect.health_path, timeout_s=5)


@check(
    "calls-out-of-order-are-refused",
    "A finish without start, and a second start, MUST be rejected, and the server continues.",
    clause="servers/a-wrong-update-is-an-error-and-the-next-one-works#7",
    dialects=("vllm",),
    ask=ask_order,
    needs=NEEDS,
    is_dangerous=True,
    deadline_s=90,
    requires=("health-with-and-without-slash",),
)
def judge_order(exchange: Exchange) -> str:
    refused = ("finish-first", "start-again")
    wrong = [exchange.one(label) for label in refused if (exchange.one(label).status or 0) < 400]
    return "; ".join(call.summary() for call in [*wrong, *(c for c in (exchange.one("health"),) if not c.is_ok)])


def ask_unpaused(talk: Talk) -> None:
    peer = open_peer(talk)
    running = calls.begin_long(talk, "running", QUESTIONS, **LONG)
    peer.send(talk.subject.policies.weights(BESIDE_EMBEDDINGS), pause=False)
    peer.finish()
    running.result()
    write(talk, "new")
    expect(talk, "new", BESIDE_EMBEDDINGS)


@check(
    "update-without-pause-is-survived",
    "An update during generation, without /pause, SHOULD be rejected or served, and the server continues.",
    clause="servers/a-wrong-update-is-an-error-and-the-next-one-works#8",
    grade=SHOULD,
    dialects=("vllm",),
    ask=ask_unpaused,
    needs=NEEDS,
    is_dangerous=True,
    deadline_s=150,
    requires=("new-weights-are-served", "running-calls-survive-an-update"),
)
def judge_unpaused(exchange: Exchange) -> str:
    return judge_ok(exchange, ("new", None))


def _one(talk: Talk) -> "tuple[str, Tensor]":
    return next((n, t) for n, t in talk.subject.policies.weights(0).items() if n.endswith("language_model.norm.weight"))
