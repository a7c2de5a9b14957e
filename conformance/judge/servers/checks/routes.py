"""One server, several routes: a chat, its ids, and a response as a stream."""

import json
from contextlib import suppress
from typing import Any

from conformance.judge.servers.check import check
from conformance.judge.servers.checks.generation import QUESTIONS, read
from conformance.judge.servers.exchange import Exchange
from conformance.judge.servers.talk import Talk

STREAM_TOKENS = 24
NOT_THERE = (404, 405)
TODAY = "2026-11-27"


def ask_chat(talk: Talk) -> None:
    """Its ids by the route that tokenizes, and the response to these ids by the other route."""
    dialect = talk.subject.dialect
    named = {"model": dialect.model} if dialect.model else {}
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    fields = {"max_tokens": 8, "temperature": 0.0, "return_token_ids": True}
    chat = talk.post("chat", dialect.picture_path, named | {"messages": messages} | fields)
    talk.post("tokenize", "/tokenize", named | {"messages": messages})
    if chat.is_ok:
        [one] = dialect.read(chat)
        talk.post("completion", dialect.generate_path, named | {"prompt": [one.prompt_ids]} | fields)


@check(
    "routes-read-a-prompt-alike",
    "A chat MUST have the prompt ids that the server's tokenization returns for its messages, and the response to "
    "these ids.",
    clause="servers/each-prompt-gets-its-own-responses#11",
    dialects=("vllm",),
    ask=ask_chat,
    since=TODAY,
    requires=("greedy-repeats",),
)
def judge_chat(exchange: Exchange) -> str:
    [chat], tokenized = read(exchange, "chat"), exchange.one("tokenize")
    if tokenized.is_ok and tokenized.reply["tokens"] != chat.prompt_ids:
        return f"the chat was read as {chat.prompt_ids}, and is tokenized as {tokenized.reply['tokens']}"
    if not tokenized.is_ok and tokenized.status not in NOT_THERE:
        return tokenized.summary()
    [plain] = read(exchange, "completion")
    return "" if plain.ids == chat.ids else f"the chat is answered by {chat.ids}, its ids by {plain.ids}"


def ask_stream(talk: Talk) -> None:
    whole = {"max_tokens": STREAM_TOKENS, "logprobs": True}
    talk.generate("whole", QUESTIONS[:1], **whole)
    stream = talk.generate("stream", QUESTIONS[:1], stream=True, **whole)
    with suppress(AttributeError, TypeError, ValueError):  # what is no stream of events stays as it came
        stream.reply = events_of(str(stream.reply))


@check(
    "a-stream-is-the-whole-response",
    "A stream MUST hold the ids, the log-probabilities and the finish reason of the whole response.",
    clause="servers/a-response-says-what-was-generated#5",
    dialects=("vllm",),
    ask=ask_stream,
    since=TODAY,
    requires=("greedy-repeats", "logprobs-fit-the-ids"),
)
def judge_stream(exchange: Exchange) -> str:
    if failed := exchange.unmet(ok=("whole", "stream")):
        return failed
    [whole], came = read(exchange, "whole"), exchange.one("stream").reply
    ids = [i for one in came for i in one.get("token_ids") or ()]
    values = [value for one in came for value in (one.get("logprobs") or {}).get("token_logprobs", ())]
    if ids != whole.ids:
        return f"the stream has the ids {ids}, the whole response {whole.ids}"
    if len(values) != len(ids):
        return f"the stream has {len(values)} log-probabilities for {len(ids)} ids"
    reasons = [one["finish_reason"] for one in came if one.get("finish_reason")]
    return "" if reasons == [whole.finish_reason] else f"the stream's finish reasons are {reasons}"


def events_of(text: str) -> list[dict[str, Any]]:
    """First choices of a stream of server-sent events.

    >>> events_of('data: {"choices": [{"token_ids": [7]}]}\\n\\ndata: [DONE]\\n\\n')
    [{'token_ids': [7]}]
    """
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    return [choice for line in lines if line != "[DONE]" for choice in json.loads(line).get("choices", ())]
