"""Health, routes, identity and malformed calls."""

from typing import Any

from conformance.judge.servers.bounded import Session
from conformance.judge.servers.check import SHOULD, SIZE, check
from conformance.judge.servers.exchange import Exchange
from conformance.judge.servers.talk import Talk

LONG = {"max_tokens": 400, "temperature": 2.0, "keep": False, "timeout_s": 60}
"""So hot that hardly any response stops early."""


def ask_health_slash(talk: Talk) -> None:
    talk.get("with", "/health/")
    talk.get("without", "/health")


@check(
    "health-with-and-without-slash",
    "Health MUST be reachable with and without a slash at its end, by one redirect at most.",
    clause="servers/a-server-can-be-found-and-watched#1",
    ask=ask_health_slash,
)
def judge_all_ok(exchange: Exchange) -> str:
    return "; ".join(call.summary() for call in exchange.calls if not call.is_ok)


def ask_health_while_generating(talk: Talk) -> None:
    running = talk.beside(talk.generate, "generate", [f"Say {i}." for i in range(8)], **LONG)
    healths = []
    while not running.done() and len(healths) < 200:
        healths.append(talk.get("health", talk.subject.dialect.health_path, note=False))
    running.result()
    talk.exchange.calls += sorted(healths, key=lambda call: call.seconds)[-1:]


@check(
    "health-while-generating",
    "Health SHOULD NOT wait for eight long responses: it returns within a second, or well before them.",
    clause="servers/a-server-can-be-found-and-watched#2",
    grade=SHOULD,
    ask=ask_health_while_generating,
    deadline_s=90,
    is_timed=True,
)
def judge_health_while_generating(exchange: Exchange) -> str:
    if not exchange.one("generate").is_ok:
        return exchange.one("generate").summary()
    health, limit = exchange.one("health"), max(1.0, 0.8 * exchange.one("generate").seconds)
    return "" if health.is_ok and health.seconds < limit else f"took {health.seconds} s; {health.summary()}"


def ask_world_size(talk: Talk) -> None:
    path = "/get_world_size" if talk.subject.dialect.family == "vllm" else "/get_world_size/"
    talk.get("world-size", path)


@check(
    SIZE,
    "The server MUST return the number of workers that take part in a weight group.",
    clause="servers/a-server-can-be-found-and-watched#3",
    ask=ask_world_size,
    needs=("group",),
)
def judge_world_size(exchange: Exchange) -> str:
    size = exchange.one("world-size").reply["world_size"]
    return "" if isinstance(size, int) and size >= 1 else f"it is {size}"


def ask_routes(talk: Talk) -> None:
    """Where no weights are sent, those of generation are all."""
    call = talk.get("routes", "/openapi.json")
    if call.is_ok and isinstance(call.reply, dict):
        call.reply = sorted(call.reply.get("paths", {}))
    dialect = talk.subject.dialect
    of_generation = {dialect.health_path, dialect.generate_path, dialect.picture_path}
    talk.note("wanted", sorted(dialect.routes if talk.subject.transport else of_generation))


@check(
    "routes-are-listed",
    "All routes that a client of the dialect calls MUST be listed in /openapi.json, so that it can detect the dialect.",
    clause="servers/a-server-can-be-found-and-watched#4",
    ask=ask_routes,
)
def judge_routes(exchange: Exchange) -> str:
    listed = {path.rstrip("/") for path in exchange.one("routes").reply}
    missing = [path for path in exchange.notes["wanted"] if path.rstrip("/") not in listed]
    return f"does not list {', '.join(missing)}" if missing else ""


def ask_wrong_method(talk: Talk) -> None:
    talk.get("get", talk.subject.dialect.generate_path)


@check(
    "wrong-method-is-405",
    "A route that is called with another method MUST return 405.",
    clause="servers/a-bad-call-is-an-error-and-harms-nobody-else#1",
    ask=ask_wrong_method,
)
def judge_wrong_method(exchange: Exchange) -> str:
    return "" if exchange.one("get").status == 405 else exchange.one("get").summary()


def ask_missing_field(talk: Talk) -> None:
    path, body, name = talk.subject.dialect.incomplete
    talk.post("incomplete", path, body)
    talk.note("missing", name)


@check(
    "missing-field-is-named",
    "A control call without a required field MUST return 4xx and the name of the field.",
    clause="servers/a-bad-call-is-an-error-and-harms-nobody-else#2",
    ask=ask_missing_field,
    needs=("group",),
)
def judge_missing_field(exchange: Exchange) -> str:
    call = exchange.one("incomplete")
    return "" if call.is_refusal and exchange.notes["missing"] in str(call.reply) else call.summary()


def ask_invalid_json(talk: Talk) -> None:
    headers = {"Content-Type": "application/json"} | dict(talk.subject.headers)
    session = _WithHeaders(headers)
    talk.call("broken", "POST", talk.subject.dialect.generate_path, data='{"prompts": [', session=session)


@check(
    "invalid-json-is-4xx",
    "A body that is not JSON MUST return 4xx.",
    clause="servers/a-bad-call-is-an-error-and-harms-nobody-else#3",
    ask=ask_invalid_json,
)
def judge_refusal(exchange: Exchange) -> str:
    return "" if exchange.calls[-1].is_refusal else exchange.calls[-1].summary()


def ask_unknown_field(talk: Talk) -> None:
    dialect = talk.subject.dialect
    body = dialect.body([talk.subject.prompt("Say one.")]) | {"no_such_field": 1}
    talk.post("unknown", dialect.generate_path, body)


@check(
    "unknown-field-is-harmless",
    "An unknown field MUST be rejected or ignored, never answered with a 5xx.",
    clause="servers/a-bad-call-is-an-error-and-harms-nobody-else#4",
    ask=ask_unknown_field,
)
def judge_no_failure(exchange: Exchange) -> str:
    return "; ".join(call.summary() for call in exchange.calls if not (call.is_ok or call.is_refusal))


def ask_version(talk: Talk) -> None:
    for path in ("/version", "/native/identity/", talk.subject.dialect.health_path):
        talk.get("version", path)


@check(
    "version-is-returned",
    "Some route SHOULD return the version of the software or of the protocol.",
    clause="servers/a-server-can-be-found-and-watched#5",
    grade=SHOULD,
    ask=ask_version,
)
def judge_version(exchange: Exchange) -> str:
    names = ("version", "protocol", "vllm_version", "protocol_version")
    for call in exchange.all("version"):
        if call.is_ok and isinstance(call.reply, dict) and any(name in call.reply for name in names):
            return ""
    return "neither /version nor /health nor /native/identity/ returns a version"


class _WithHeaders:
    """Calls with other headers."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers

    def request(self, method: str, url: str, **keywords: Any) -> Any:
        return Session().request(method, url, **keywords | {"headers": self.headers})
