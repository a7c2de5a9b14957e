"""Is it there, and does it say what it is?"""

from typing import Any

from conformance.servers.check import SHOULD, Check
from conformance.servers.exchange import Exchange
from conformance.servers.talk import Talk

LONG = {"max_tokens": 400, "temperature": 2.0, "keep": False, "timeout_s": 60}
"""So hot that hardly any response stops early."""


def ask_health_slash(talk: Talk) -> None:
    talk.get("with", "/health/")
    talk.get("without", "/health")


def judge_all_ok(told: Exchange) -> str:
    return "; ".join(call.tell() for call in told.calls if not call.is_ok)


def ask_health_while_generating(talk: Talk) -> None:
    running = talk.beside(talk.generate, "generate", [f"Say {i}." for i in range(8)], **LONG)
    healths = []
    while not running.done() and len(healths) < 200:
        healths.append(talk.get("health", talk.subject.dialect.health_path, note=False))
    running.result()
    talk.exchange.calls += sorted(healths, key=lambda call: call.seconds)[-1:]


def judge_health_while_generating(told: Exchange) -> str:
    if not told.one("generate").is_ok:
        return told.one("generate").tell()
    health, limit = told.one("health"), max(1.0, 0.8 * told.one("generate").seconds)
    return "" if health.is_ok and health.seconds < limit else f"took {health.seconds} s; {health.tell()}"


def ask_world_size(talk: Talk) -> None:
    path = "/get_world_size" if talk.subject.dialect.name == "vllm" else "/get_world_size/"
    talk.get("world-size", path)


def judge_world_size(told: Exchange) -> str:
    size = told.one("world-size").reply["world_size"]
    return "" if isinstance(size, int) and size >= 1 else f"it is {size}"


def ask_routes(talk: Talk) -> None:
    call = talk.get("routes", "/openapi.json")
    call.reply = sorted(call.reply["paths"]) if call.is_ok else call.reply
    talk.note("wanted", sorted(talk.subject.dialect.routes))


def judge_routes(told: Exchange) -> str:
    listed = {path.rstrip("/") for path in told.one("routes").reply}
    missing = [path for path in told.notes["wanted"] if path.rstrip("/") not in listed]
    return f"does not list {', '.join(missing)}" if missing else ""


def ask_wrong_method(talk: Talk) -> None:
    talk.get("get", talk.subject.dialect.generate_path)


def judge_wrong_method(told: Exchange) -> str:
    return "" if told.one("get").status == 405 else told.one("get").tell()


def ask_missing_field(talk: Talk) -> None:
    path, body, name = talk.subject.dialect.incomplete
    talk.post("incomplete", path, body)
    talk.note("missing", name)


def judge_missing_field(told: Exchange) -> str:
    call = told.one("incomplete")
    return "" if call.is_refusal and told.notes["missing"] in str(call.reply) else call.tell()


def ask_invalid_json(talk: Talk) -> None:
    headers = {"Content-Type": "application/json"} | dict(talk.subject.headers)
    session = _WithHeaders(headers)
    talk.call("broken", "POST", talk.subject.dialect.generate_path, data='{"prompts": [', session=session)


def judge_refusal(told: Exchange) -> str:
    return "" if told.calls[-1].is_refusal else told.calls[-1].tell()


def ask_unknown_field(talk: Talk) -> None:
    dialect = talk.subject.dialect
    body = dialect.body([talk.subject.prompt("Say one.")]) | {"no_such_field": 1}
    talk.post("unknown", dialect.generate_path, body)


def judge_no_failure(told: Exchange) -> str:
    return "; ".join(call.tell() for call in told.calls if not (call.is_ok or call.is_refusal))


def ask_version(talk: Talk) -> None:
    for path in ("/version", "/native/identity/", talk.subject.dialect.health_path):
        talk.get("version", path)


def judge_version(told: Exchange) -> str:
    names = ("version", "protocol", "vllm_version", "protocol_version")
    for call in told.all("version"):
        if call.is_ok and isinstance(call.reply, dict) and any(name in call.reply for name in names):
            return ""
    return "neither /version nor /health nor /native/identity/ tells a version"


class _WithHeaders:
    """``requests`` with other headers."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers

    def request(self, method: str, url: str, **keywords: Any) -> Any:
        import requests

        return requests.request(method, url, **keywords | {"headers": self.headers})


CHECKS = (
    Check(
        check_id="health-with-and-without-slash",
        sentence="Health is reachable with and without a slash at its end, by one redirect at most.",
        ask=ask_health_slash,
        judge=judge_all_ok,
    ),
    Check(
        check_id="world-size-is-told",
        sentence="The server returns the number of workers that take part in a weight group.",
        ask=ask_world_size,
        judge=judge_world_size,
    ),
    Check(
        check_id="routes-are-listed",
        sentence="/openapi.json lists all routes of the dialect, so that a client can detect it.",
        ask=ask_routes,
        judge=judge_routes,
    ),
    Check(
        check_id="wrong-method-is-405",
        sentence="A route that is called with another method returns 405.",
        ask=ask_wrong_method,
        judge=judge_wrong_method,
    ),
    Check(
        check_id="missing-field-is-named",
        sentence="A control call without a required field returns 4xx and the name of the field.",
        ask=ask_missing_field,
        judge=judge_missing_field,
    ),
    Check(
        check_id="invalid-json-is-4xx",
        sentence="A body that is not JSON returns 4xx.",
        ask=ask_invalid_json,
        judge=judge_refusal,
    ),
    Check(
        check_id="unknown-field-is-harmless",
        sentence="An unknown field is rejected or ignored, never a 5xx.",
        ask=ask_unknown_field,
        judge=judge_no_failure,
    ),
    Check(
        check_id="version-is-told",
        sentence="Some route returns the version of the software or of the protocol.",
        grade=SHOULD,
        ask=ask_version,
        judge=judge_version,
    ),
    Check(
        check_id="health-while-generating",
        sentence="Health does not wait for eight long responses: it returns within a second, or well before them.",
        grade=SHOULD,
        ask=ask_health_while_generating,
        judge=judge_health_while_generating,
        deadline_s=90,
        is_timed=True,
    ),
)
