"""Servers of a few lines that the judge judges, and checks made up for its tests."""

import json
from contextlib import contextmanager

from conformance.doubles.http_server import http_server, send
from conformance.judge.servers.check import Check
from conformance.judge.servers.dialects import DIALECTS
from conformance.judge.servers.judgement import JudgingRules, ServerJudgement
from conformance.judge.servers.subject import Subject

ROUTES = DIALECTS["trl"]().routes
REPLY = {"prompt_ids": [[1, 2]], "completion_ids": [[3, 4]], "logprobs": None}


@contextmanager
def small_server(*, generate=lambda body: (200, REPLY), health=200, version="1.2"):
    """A server of the trl dialect that answers every prompt with two tokens; ``calls`` are the paths it was asked."""
    calls = []

    def answer(handler):
        raw = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        calls.append(handler.path)
        if handler.path == "/openapi.json":
            send(handler, 200, {"paths": {route: {} for route in ROUTES}})
        elif handler.path == "/missing/":
            send(handler, 404, {})
        elif handler.path == "/generate/":
            send(handler, *generate(json.loads(raw)))
        else:
            send(handler, health, {"world_size": 1, "version": version})

    with http_server(answer) as server:
        server.calls = calls
        yield server


def judgement_of(server, **terms):
    subject = Subject(name="x", version="1", url=server.url, dialect=DIALECTS["trl"]())
    return ServerJudgement(subject, JudgingRules(**terms))


def make_check(check_id, *reasons, ask=None, **fields):
    """Misses with each reason in turn, the last one repeats; an empty one passes."""
    left = list(reasons) or [""]

    def judge(exchange):
        return exchange.notes.get("reason", "")

    def ask_next(talk):
        talk.post("asked", f"/{check_id}/")
        talk.note("reason", left.pop(0) if len(left) > 1 else left[0])

    return Check(check_id=check_id, sentence=f"{check_id} holds.", ask=ask or ask_next, judge=judge, **fields)


@contextmanager
def replying(status, body, *, closes=False, wait=lambda: None):
    """URL of a server with one reply to everything; ``closes``: it ends each connection without saying so."""

    def answer(handler):
        handler.rfile.read(int(handler.headers.get("content-length", 0)))
        wait()
        handler.close_connection = closes or handler.close_connection
        send(handler, status, body)

    with http_server(answer, protocol="HTTP/1.1") as server:
        yield server.url


def subject_at(url, dialect="swift"):
    return Subject(name="x", version="1", url=url, dialect=DIALECTS[dialect]())
