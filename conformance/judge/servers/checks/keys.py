"""Calls without the server's key. Where it has none, they are not asked."""

from conformance.judge.servers.check import check
from conformance.judge.servers.checks.generation import QUESTIONS
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.talk import Talk

ADDED = "2026-11-24"
WITH_A_KEY = ("native", "swift", "vllm")
"""TRL's clients send none."""
OTHER_KEYS = {"without": "", "wrong": "not-the-key"}
REFUSED, NOT_SERVED = (401, 403), (401, 403, 404)
"""A route that a server does not have needs no key."""


def ask_prompts(talk: Talk) -> None:
    dialect = talk.subject.dialect
    path, body = dialect.generate_path, dialect.body([talk.subject.prompt(QUESTIONS[0])], max_tokens=1)
    for label, key in OTHER_KEYS.items():
        for each in dict.fromkeys((path, dialect.picture_path)):
            talk.post(label, each, body, key=key)
    talk.post("other form", path.rstrip("/") if path.endswith("/") else f"{path}/", body, key="")
    talk.post("with", path, body)


@check(
    "prompts-need-the-key",
    "A server with a key MUST return 401 or 403 to prompts without it, or with another one, and serve those with it.",
    clause="servers/a-key-is-asked-for#1",
    ask=ask_prompts,
    since=ADDED,
    needs=("key",),
    dialects=WITH_A_KEY,
)
def judge_prompts(exchange: Exchange) -> str:
    """The path with or without a slash at its end may lead nowhere, but not to an answer."""
    wrong = [call for label in OTHER_KEYS for call in exchange.all(label) if call.status not in NOT_SERVED]
    wrong += [call for call in exchange.all("other form") if call.is_ok]
    return "; ".join(map(_said, wrong)) or exchange.unmet(ok=("with",))


def ask_control(talk: Talk) -> None:
    """With the key at last: a pause that was open is over then."""
    for path in talk.subject.dialect.control_paths:
        for label, key in OTHER_KEYS.items():
            talk.post(label, path, key=key)
    for path in talk.subject.dialect.control_paths:
        talk.post("with", path)


@check(
    "control-calls-need-the-key",
    "A server with a key MUST return 401 or 403 to calls that change weights or stop generation, unless they have the "
    "key.",
    clause="servers/a-key-is-asked-for#2",
    ask=ask_control,
    since=ADDED,
    needs=("key",),
    dialects=WITH_A_KEY,
    requires=("prompts-need-the-key",),
)
def judge_control(exchange: Exchange) -> str:
    wrong = [call for label in OTHER_KEYS for call in exchange.all(label) if call.status not in NOT_SERVED]
    wrong += [call for call in exchange.all("with") if call.failure or call.status in REFUSED]
    return "; ".join(map(_said, wrong))


def _said(call: RecordedCall) -> str:
    return f"{call.label}{'' if call.label == 'other form' else ' key'}: {call.path} -> {call.failure or call.status}"
