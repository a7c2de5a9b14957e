"""Bad calls, calls at the same time, and callers that hang up."""

import time
from concurrent.futures import Future
from typing import Any

import requests
from urllib3.util.connection import is_connection_dropped

from conformance.judge.servers.bounded import Session, in_thread
from conformance.judge.servers.check import SHOULD, check
from conformance.judge.servers.checks.generation import QUESTIONS, read
from conformance.judge.servers.checks.liveness import LONG, judge_all_ok
from conformance.judge.servers.exchange import Exchange, RecordedCall, shown
from conformance.judge.servers.talk import Talk

TOO_LONG = "List every digit with its box, from top to bottom. " * 200
LONG_IS_IN_S, CLOSED_IN_S = 0.6, 0.5
MIX_S, MIX_LIMIT_S, NUM_MIXED = 8.0, 40.0, 100
"""A mix lasts this long, and longer until so many calls were generated for: on a slow machine fewer overlap."""


def ask_bad_sampling(talk: Talk) -> None:
    talk.generate("bad", QUESTIONS[:1], max_tokens=-1)
    talk.generate("after", QUESTIONS[:1])


def ask_too_long(talk: Talk) -> None:
    talk.generate("bad", [TOO_LONG])
    talk.generate("after", QUESTIONS[:1])


@check(
    "bad-sampling-value-is-4xx",
    "A call with max_tokens = -1 MUST return 4xx, and the next call is served.",
    clause="servers/a-bad-call-is-an-error-and-harms-nobody-else#5",
    ask=ask_bad_sampling,
)
@check(
    "too-long-prompt-is-4xx",
    "A prompt that does not fit MUST return 4xx, and the next call is served.",
    clause="servers/a-bad-call-is-an-error-and-harms-nobody-else#6",
    ask=ask_too_long,
    is_dangerous=True,
)
def judge_bad(exchange: Exchange) -> str:
    return exchange.unmet(refused=("bad",), ok=("after",))


def ask_spoilt(talk: Talk) -> None:
    dialect = talk.subject.dialect
    talk.post("bad", dialect.generate_path, dialect.spoilt([talk.subject.prompt(text) for text in QUESTIONS[:2]]))
    talk.generate("after", QUESTIONS[:1])


@check(
    "a-bad-prompt-is-reported",
    "One prompt that cannot be served SHOULD give a partial result or 4xx, and the next call is served.",
    clause="servers/a-bad-call-is-an-error-and-harms-nobody-else#7",
    grade=SHOULD,
    ask=ask_spoilt,
    is_dangerous=True,
)
def judge_spoilt(exchange: Exchange) -> str:
    """The good prompt is answered, or the call is refused."""
    bad = exchange.one("bad")
    is_whole = bad.is_ok and len(read(exchange, "bad")) == 2
    return exchange.unmet(ok=("after",)) if is_whole or bad.is_refusal else bad.summary()


def ask_correlation(talk: Talk) -> None:
    dialect = talk.subject.dialect
    body = dialect.body([talk.subject.prompt(QUESTIONS[0])])
    name = "judge-4711"
    if dialect.family == "swift":
        body["infer_requests"][0]["uuid"] = name
    elif dialect.family == "native":
        body["requests"][0]["request_id"] = name
    else:
        body["request_id"] = name
    talk.post("generate", dialect.generate_path, body)
    talk.note("name", name)


@check(
    "request-name-comes-back",
    "A reply SHOULD contain the id of its request.",
    clause="servers/each-prompt-gets-its-own-responses#8",
    grade=SHOULD,
    dialects=("native", "swift", "vllm"),
    ask=ask_correlation,
)
def judge_correlation(exchange: Exchange) -> str:
    call = exchange.one("generate")
    is_named = call.is_ok and exchange.notes["name"] in str(call.reply)
    return "" if is_named else "the reply does not contain the request's name"


def let_in(_long: "Future[Any]", takes_s: float) -> None:
    """Nothing on the wire says that a call has arrived; one that takes so long is not over then."""
    time.sleep(min(LONG_IS_IN_S, takes_s / 4))


def begin_long(talk: Talk, label: str, questions: tuple[str, ...], **options: Any) -> "Future[Any]":
    """A call of long responses that has arrived, most likely; a short one before it says how long a reply takes."""
    alone = talk.generate("before", questions, max_tokens=8)
    running = talk.beside(talk.generate, label, questions, **options)
    let_in(running, 4 * alone.seconds)
    return running


def ask_overlap(talk: Talk) -> None:
    """What comes first counts, not how long it takes: that depends on what else the machine does."""
    alone = talk.generate("warm", QUESTIONS[:1], **LONG)
    long = talk.beside(talk.generate, "long", QUESTIONS, **LONG)
    let_in(long, alone.seconds)
    if long.done():
        talk.exchange.untestable = "the long responses end before another call can arrive"
    talk.generate("short", QUESTIONS[:1], max_tokens=1)
    talk.note("passed_by", not long.done())
    long.result()


@check(
    "short-call-passes-long-one",
    "A call for one token that arrives during long responses SHOULD return before them.",
    clause="servers/a-bad-call-is-an-error-and-harms-nobody-else#9",
    grade=SHOULD,
    ask=ask_overlap,
    deadline_s=60,
    is_timed=True,
)
def judge_overlap(exchange: Exchange) -> str:
    if failed := judge_all_ok(exchange):
        return failed
    waited, long = exchange.one("short").seconds, exchange.one("long").seconds
    return "" if exchange.notes["passed_by"] else f"a call for one token waits {waited} s for one that takes {long} s"


def ask_hang_up(talk: Talk) -> None:
    talk.generate("short", QUESTIONS[:1])
    body = {"max_tokens": 450, "temperature": 2.0}
    talk.generate("left", [f"Say {i}." for i in range(48)], timeout_s=0.5, **body)
    talk.generate("after", QUESTIONS[:1])


@check(
    "hanging-up-frees-the-engine",
    "After a caller disconnects, the next call SHOULD NOT wait for the abandoned one.",
    clause="servers/a-bad-call-is-an-error-and-harms-nobody-else#10",
    grade=SHOULD,
    ask=ask_hang_up,
    deadline_s=60,
    is_timed=True,
)
def judge_hang_up(exchange: Exchange) -> str:
    after = exchange.one("after")
    if not after.is_ok:
        return after.summary()
    return (
        "" if after.seconds < 1.5 else f"the next call waits {after.seconds} s, not {exchange.one('short').seconds} s"
    )


def ask_keep_alive(talk: Talk) -> None:
    """Whether it is closed counts; the next call, which may open another, fails only if it comes at the same moment."""
    with Session() as session:
        talk.generate("bad", QUESTIONS[:1], max_tokens=-1, session=session)
        time.sleep(CLOSED_IN_S)
        talk.note("is_kept", _is_kept(session))
        talk.generate("after", QUESTIONS[:1], session=session)


def _is_kept(session: requests.Session) -> bool:
    pools = session.get_adapter("http://").poolmanager.pools
    kept = [connection for key in pools.keys() for connection in pools[key].pool.queue if connection is not None]  # noqa: SIM118
    return any(not is_connection_dropped(connection) for connection in kept)


@check(
    "connection-survives-an-error",
    "A kept-alive connection SHOULD serve the next call after an error.",
    clause="servers/a-bad-call-is-an-error-and-harms-nobody-else#8",
    grade=SHOULD,
    ask=ask_keep_alive,
)
def judge_keep_alive(exchange: Exchange) -> str:
    if failed := exchange.unmet(ok=("after",)):
        return failed
    return "" if exchange.notes["is_kept"] else "the connection is closed after the error"


def ask_mixed(talk: Talk) -> None:
    """Callers that each know their own answer, beside one who uses another route, for some seconds."""
    began = time.monotonic()
    method, path = talk.subject.dialect.quick_call
    wrong: list[str] = []
    generated: list[int] = []

    def goes_on() -> bool:
        spent_s = time.monotonic() - began
        return spent_s < MIX_S or not (wrong or spent_s > MIX_LIMIT_S or len(generated) >= NUM_MIXED)

    def repeat(question: str) -> int:
        expected, count = talk.subject.prompt(question).ids, 0
        while goes_on():
            call = talk.generate("generate", [question], timeout_s=15, keep=True)
            if call.is_ok and not _is_for(talk, call, expected):
                wrong.append(shown(call.reply))
            count += 1
            generated.append(count)
        return count

    def disturb() -> int:
        count, sent = 0, {} if method == "GET" else {"json": {}}
        while goes_on():
            talk.call("other", method, path, timeout_s=15, **sent)
            count += 1
        return count

    threads = [in_thread(repeat, question) for question in QUESTIONS[:2]] + [in_thread(disturb) for _ in range(2)]
    counts = [thread.result() for thread in threads]
    kept = [call for call in talk.exchange.calls if not call.is_ok][:3]
    talk.exchange.calls[:] = kept + talk.exchange.calls[:1]
    talk.note("counts", counts)
    talk.note("swapped", wrong[:3])
    talk.note("num_swapped", len(wrong))
    talk.generate("after", QUESTIONS[:1])


def _is_for(talk: Talk, call: RecordedCall, prompt_ids: list[int]) -> bool:
    try:
        return [one.prompt_ids for one in talk.subject.dialect.read(call)] == [prompt_ids]
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


@check(
    "replies-are-never-swapped",
    "Concurrent calls of several routes MUST each get their own reply, and none fails.",
    clause="servers/each-prompt-gets-its-own-responses#7",
    ask=ask_mixed,
    needs=("model",),
    deadline_s=120,
    is_dangerous=True,
    requires=("one-prompt-one-response",),
)
def judge_mixed(exchange: Exchange) -> str:
    if exchange.notes["swapped"]:
        count = exchange.notes.get("num_swapped", len(exchange.notes["swapped"]))
        return f"{count} of {sum(exchange.notes['counts'])} replies are somebody else's: {exchange.notes['swapped'][0]}"
    return judge_all_ok(exchange)
