"""Responses that an update comes into: streams, and the versions that they name."""

from contextlib import suppress
from typing import Any

from conformance.judge.servers.check import SHOULD, check
from conformance.judge.servers.checks import calls
from conformance.judge.servers.checks.generation import QUESTIONS
from conformance.judge.servers.checks.liveness import LONG
from conformance.judge.servers.checks.routes import events_of
from conformance.judge.servers.checks.weights import NEEDS
from conformance.judge.servers.exchange import Exchange
from conformance.judge.servers.peers import BESIDE_EMBEDDINGS, open_peer, sync
from conformance.judge.servers.talk import Talk

TODAY = "2026-11-27"
TOKENS_IN = "/inference/v1/generate"
"""vLLM's route of ids, whose responses name the versions of their weights."""
NOT_THERE = (403, 404, 405)


def ask_stream(talk: Talk) -> None:
    """A whole update while streams are written."""
    peer, options = open_peer(talk), LONG | {"timeout_s": 90, "keep": True}
    talk.note("limit", options["max_tokens"])
    running = calls.begin_long(talk, "stream", QUESTIONS, stream=True, **options)
    sync(talk, BESIDE_EMBEDDINGS, peer=peer)
    stream = running.result()
    with suppress(AttributeError, TypeError, ValueError):  # what is no stream of events stays as it came
        stream.reply = _ends_of(str(stream.reply))


def _ends_of(text: str) -> list[dict[str, Any]]:
    """Of each choice: how many ids came, and the finish reasons."""
    ends: dict[int, dict[str, Any]] = {}
    for event in events_of(text):
        end = ends.setdefault(event["index"], {"num_ids": 0, "reasons": []})
        end["num_ids"] += len(event.get("token_ids") or ())
        end["reasons"] += filter(None, [event.get("finish_reason")])
    return [ends[index] for index in sorted(ends)]


@check(
    "a-stream-survives-an-update",
    "A stream during which weights are updated MUST go on to its end, with one finish reason.",
    clause="servers/what-was-sent-is-what-is-served#13",
    dialects=("vllm",),
    ask=ask_stream,
    since=TODAY,
    needs=NEEDS,
    is_dangerous=True,
    requires=("running-calls-survive-an-update", "a-stream-is-the-whole-response", "a-pause-loses-no-response"),
    deadline_s=150,
)
def judge_stream(exchange: Exchange) -> str:
    if failed := exchange.unmet(ok=("stream",)):
        return failed
    ends = exchange.one("stream").reply
    if len(ends) != len(QUESTIONS):
        return f"{len(ends)} streams of {len(QUESTIONS)} prompts"
    for end in ends:
        is_whole = end["reasons"] == ["stop"] or (
            end["reasons"] == ["length"] and end["num_ids"] == exchange.notes["limit"]
        )
        if not is_whole:
            came = f"{end['num_ids']} of {exchange.notes['limit']} ids"
            return f"a stream has {came} and the finish reasons {end['reasons']}"
    return ""


def ask_versions(talk: Talk) -> None:
    """One response before an update, one that it comes into, one after it; and what the server says its version is."""
    peer, version = open_peer(talk), "/weight_info"
    sync(talk, 0, peer=peer)
    talk.get("version-before", version)
    alone = _write(talk, "before", 8)
    if alone.status in NOT_THERE:
        talk.exchange.inapplicable = "no response names the version of its weights"
        return
    running = talk.beside(_write, talk, "over", LONG["max_tokens"])
    calls.let_in(running, 4 * alone.seconds)
    sync(talk, BESIDE_EMBEDDINGS, peer=peer)
    talk.get("version-after", version)
    running.result()
    _write(talk, "after", 8)


def _write(talk: Talk, label: str, max_tokens: int) -> Any:
    sampling = {"max_tokens": max_tokens, "temperature": 2.0, "ignore_eos": True}
    body = {"token_ids": talk.subject.prompt(QUESTIONS[0]).ids, "sampling_params": sampling}
    return talk.post(label, TOKENS_IN, body, timeout_s=90)


@check(
    "a-response-names-the-weights-that-wrote-it",
    "The weight versions of a response SHOULD cover its ids in order, from the version before an update to that "
    "after it.",
    clause="servers/what-was-sent-is-what-is-served#14",
    grade=SHOULD,
    dialects=("vllm",),
    ask=ask_versions,
    since=TODAY,
    needs=NEEDS,
    is_dangerous=True,
    requires=("running-calls-survive-an-update", "weight-version-grows", "one-prompt-one-response"),
    deadline_s=150,
)
def judge_versions(exchange: Exchange) -> str:
    if failed := exchange.unmet(ok=("version-before", "before", "over", "version-after", "after")):
        return failed
    old, new = (str(exchange.one(f"version-{when}").reply["weight_version"]) for when in ("before", "after"))
    for label, due in (("before", ([old],)), ("over", ([old], [new], [old, new])), ("after", ([new],))):
        [choice] = exchange.one(label).reply["choices"]
        spans = choice.get("weight_versions")
        if not spans:
            return f"{label}: no weight versions"
        if [str(span["version"]) for span in spans] not in due:
            return f"{label}: versions {spans} of weights that were {old}, then {new}"
        edges = [0, *(span["end"] for span in spans)]
        if [span["start"] for span in spans] != edges[:-1] or edges[-1] != len(choice["token_ids"]):
            return f"{label}: {spans} do not cover the {len(choice['token_ids'])} ids"
    return ""
