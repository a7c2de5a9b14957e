"""Clients before servers that would hold or fill them: each call ends by name, in its own time and size."""

import dataclasses
import os
import time
from contextlib import ExitStack, nullcontext, suppress
from functools import partial

import pytest

from conformance.doubles.hostile import (
    around,
    away,
    begin,
    endless,
    move,
    moved_without_end,
    nested,
    packed,
    slow,
    slow_head,
)
from conformance.doubles.http_server import http_server, send
from conformance.doubles.refusals import refused
from conformance.doubles.swift_double import QUICK, RULES, prompts
from rollmatch.dialects.http import HttpServer
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.dialects.vllm.teacher import JudgedTokens, TeacherServer

LIMIT_S, LATE_S = 1.0, 4.0
CODES = {slow: "call-timeout", slow_head: "call-timeout", endless: "reply-malformed"}
CODES |= dict.fromkeys((nested, packed, moved_without_end), "reply-malformed")
CODES |= dict.fromkeys((around, away), "server-refused")
JUDGED = JudgedTokens(token_ids=(1, 2), prompt_len=1)
CALLS = {
    "get": lambda url: HttpServer(url).get("/health", timeout_s=LIMIT_S),
    "post": lambda url: HttpServer(url).post("/update", {}, timeout_s=LIMIT_S),
    "begin": lambda url: HttpServer(url).begin("/update", {}, timeout_s=LIMIT_S).result(),
    "a teacher": lambda url: TeacherServer(url).teach(JUDGED, top_k=1, timeout_s=LIMIT_S),
    "without a limit, once its reply has begun": lambda url: HttpServer(url, reply_s=LIMIT_S).post(
        "/generate", {}, timeout_s=None
    ),
}


def served(how, elsewhere=""):
    """The URL's server does ``how`` to every call but those that name models."""

    def answer(handler):
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        with suppress(OSError):  # the caller has had enough
            if handler.path == "/v1/models":
                begin(handler)
                handler.wfile.write(b'{"data": [{"id": "m"}]}')
            else:
                how(handler, elsewhere)

    return http_server(answer)


@pytest.mark.parametrize("how", CODES)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_by_name_in_its_own_time_and_size(call, how):
    asked = []
    with http_server(lambda handler: asked.append(handler.path)) as other, served(how, other.url) as server:
        began = time.monotonic()
        with refused(CODES[how], server.url):
            CALLS[call](server.url)
        assert time.monotonic() - began < LATE_S
    assert not asked


@pytest.mark.parametrize(("status", "keeps_body"), [(301, False), (302, False), (303, False), (307, True), (308, True)])
def test_a_redirect_within_the_server_is_followed_with_its_body_or_not(status, keeps_body):
    def answer(handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0))).decode()
        if handler.path.endswith("/"):
            send(handler, 200, {"body": body})
        else:
            move(handler, f"{handler.path}/", status)

    with http_server(answer) as server:
        with nullcontext() if keeps_body else refused("server-refused", server.url, problem="redirected to /update/"):
            assert HttpServer(server.url).post("/update", {"a": 1}, timeout_s=20).body == {"body": '{"a":1}'}
        assert HttpServer(server.url).get("/health", timeout_s=20).body == {"body": ""}


def test_a_reply_may_be_longer_by_the_tokens_that_were_asked_for(monkeypatch):
    monkeypatch.setattr("rollmatch.dialects.http.REPLY_BYTES", 1000)
    monkeypatch.setattr("rollmatch.dialects.http.TOKEN_BYTES", 10)
    with http_server(lambda handler: send(handler, 200, {"a": "x" * 1500})) as server:
        post = partial(HttpServer(server.url).post, "/generate", timeout_s=20)
        with refused("reply-malformed", server.url, problem="answered with more than"):
            post(num_tokens=50)
        assert len(post(num_tokens=60).body["a"]) == 1500


def test_health_that_trickles_is_a_death():
    """The watch beside a call does not wait for it for longer than for silence."""

    def answer(handler):
        slow_head(handler, "")

    settings = ClientSettings(timeout_s=3, watch=dataclasses.replace(QUICK, stall_s=30.0))
    with http_server(answer) as server:
        began = time.monotonic()
        with refused("server-died", server.url):
            RolloutServer(server.url, settings).infer(prompts(2), RULES)
        assert time.monotonic() - began < LATE_S


def test_a_caller_with_more_files_than_select_knows_is_answered():
    """``select`` refuses files from 1,024 on; learners of many data files and servers have more."""
    with http_server(lambda handler: send(handler, 200, {"status": "ok"})) as server, ExitStack() as files:
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        assert HttpServer(server.url).get("/health", timeout_s=LIMIT_S).body == {"status": "ok"}
