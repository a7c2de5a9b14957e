"""Generation that is paused, and weights that sleep."""

from conformance.judge.servers.check import check
from conformance.judge.servers.checks import calls
from conformance.judge.servers.checks.generation import QUESTIONS, ids_of, read
from conformance.judge.servers.checks.routes import TODAY
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.peers import sync
from conformance.judge.servers.talk import Talk

MODES = ("keep", "wait", "abort")
"""Running responses: they continue after ``/resume``, end before ``/pause`` returns, or are given up."""
HELD = {"max_tokens": 200, "temperature": 2.0, "timeout_s": 60}
"""So hot that few responses stop early."""
WAKING = ("at once", "by tags")
UNABLE = (400, 404, 405, 500, 501)


def rest(talk: Talk, label: str, what: str) -> RecordedCall:
    """The last of the calls that the dialect makes for it."""
    for path, body in talk.subject.dialect.rests[what]:
        call = talk.post(label, path, body, timeout_s=60)
    return call


def ask_pauses(talk: Talk) -> None:
    alone = talk.generate("before", QUESTIONS, max_tokens=8)
    for mode in MODES:
        running = talk.beside(talk.generate, f"running, {mode}", QUESTIONS, **HELD)
        calls.let_in(running, 4 * alone.seconds)
        rest(talk, f"pause, {mode}", f"pause, {mode}")
        rest(talk, f"resume, {mode}", "resume")
        running.result()
        talk.generate(f"after, {mode}", QUESTIONS, max_tokens=8)


@check(
    "a-pause-loses-no-response",
    "A pause with the mode keep or wait MUST lose no id of a running response, and after each mode prompts are "
    "answered as before.",
    clause="servers/a-server-that-rests-comes-back#1",
    dialects=("vllm",),
    ask=ask_pauses,
    since=TODAY,
    needs=("group",),
    requires=("greedy-repeats", "alone-as-in-a-batch", "finish-reason-says-how-it-ended"),
    deadline_s=150,
)
def judge_pauses(exchange: Exchange) -> str:
    for mode in MODES:
        if failed := exchange.unmet(ok=(f"pause, {mode}", f"resume, {mode}", f"after, {mode}")):
            return failed
        if ids_of(exchange, f"after, {mode}") != ids_of(exchange, "before"):
            return f"after a pause with the mode {mode}, prompts have other answers"
    for mode in ("keep", "wait"):
        for one in read(exchange, f"running, {mode}"):
            is_whole = one.finish_reason == "stop" or len(one.ids) == HELD["max_tokens"]
            if one.finish_reason not in ("stop", "length") or not is_whole:
                return f"a response that ran when {mode} paused has {len(one.ids)} ids and ended by {one.finish_reason}"
    return ""


def ask_sleep(talk: Talk) -> None:
    talk.generate("before", QUESTIONS, max_tokens=8)
    for how in WAKING:
        asleep = rest(talk, f"sleep, {how}", "sleep")
        if asleep.status in UNABLE:
            talk.exchange.inapplicable = f"the server does not sleep: {asleep.summary()}"
            return
        rest(talk, f"wake, {how}", f"wake, {how}")
        talk.generate(f"after, {how}", QUESTIONS, max_tokens=8)


@check(
    "a-server-that-slept-answers-as-before",
    "After sleep at level 1, a server that is woken at once or by tags MUST answer as before.",
    clause="servers/a-server-that-rests-comes-back#2",
    dialects=("vllm",),
    ask=ask_sleep,
    since=TODAY,
    needs=("group",),
    is_dangerous=True,
    requires=("greedy-repeats",),
    deadline_s=150,
)
def judge_sleep(exchange: Exchange) -> str:
    if failed := exchange.unmet(ok=[call.label for call in exchange.calls]):
        return failed
    other = [how for how in WAKING if ids_of(exchange, f"after, {how}") != ids_of(exchange, "before")]
    return f"after waking {' and '.join(other)}, prompts have other answers" if other else ""


def ask_deep_sleep(talk: Talk) -> None:
    """Its weights are gone: as a learner that shares the GPU does, wake them, send them, then wake the cache."""
    peer = sync(talk, 0)
    talk.generate("before", QUESTIONS, max_tokens=8)
    asleep = rest(talk, "sleep", "deep sleep")
    if asleep.status in UNABLE:
        talk.exchange.inapplicable = f"the server does not sleep: {asleep.summary()}"
        return
    rest(talk, "wake-weights", "wake, weights")
    peer.send(talk.subject.policies.weights(0))
    rest(talk, "finish", "finish")
    rest(talk, "wake-cache", "wake, rest")
    rest(talk, "resume", "resume")
    talk.generate("after", QUESTIONS, max_tokens=8)


@check(
    "a-deep-sleeper-serves-the-weights-it-is-sent",
    "After sleep at level 2, a server whose weights are woken and sent again MUST answer as before.",
    clause="servers/a-server-that-rests-comes-back#3",
    dialects=("vllm",),
    ask=ask_deep_sleep,
    since=TODAY,
    needs=("model", "group"),
    is_dangerous=True,
    requires=("a-server-that-slept-answers-as-before", "same-weights-same-responses"),
    deadline_s=150,
)
def judge_deep_sleep(exchange: Exchange) -> str:
    if failed := exchange.unmet(ok=("before", "sleep", "wake-weights", "finish", "wake-cache", "after")):
        return failed
    is_same = ids_of(exchange, "after") == ids_of(exchange, "before")
    return "" if is_same else "after deep sleep and an update with the same weights, prompts have other answers"
