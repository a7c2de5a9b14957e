"""A call that is sent without a thread is the same call: errors, time limit, key and path as of one that waits."""

import dataclasses
import itertools
import json
import threading
import time

import pytest
import requests
import responses

from conformance.doubles.refusals import refused
from conformance.doubles.swift_double import QUICK, RULES, prompts
from conformance.judge.servers.bounded import in_thread
from rollmatch.dialects.http import MSGPACK, HttpServer
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.rollout.retry import is_transient

BODY = {"infer_requests": [{"messages": [{"content": "3"}]}]}


def begin(double, *, timeout_s=20.0, base_url=None, **keywords):
    return HttpServer(base_url or double.url, **keywords).begin("/infer/", BODY, timeout_s=timeout_s)


def test_it_is_sent_at_once_and_read_by_result(double):
    arrived, may_answer = threading.Event(), threading.Event()

    def answer(handler, said):
        arrived.set()
        assert may_answer.wait(20)
        double.echo(handler, said)

    double.infer = answer
    call = begin(double)
    assert arrived.wait(20)
    assert not call.is_done()
    assert not call.is_done(within_s=0.01)
    may_answer.set()
    assert call.is_done(within_s=20)
    assert [entry["response"]["prompt_token_ids"] for entry in call.result().body] == [[1, 3]]
    assert call.result().body == HttpServer(double.url).post("/infer/", BODY, timeout_s=20).body
    assert double.bodies == [BODY, BODY]


def test_calls_to_several_servers_are_under_way_together(double):
    together = threading.Barrier(3)

    def answer(handler, said):
        together.wait(20)
        double.echo(handler, said)

    double.infer, num_threads = answer, threading.active_count()
    calls = [begin(double) for _ in range(3)]
    assert [len(call.result().body) for call in calls] == [1, 1, 1]
    assert threading.active_count() <= num_threads + 3  # the double's own
    assert double.num_connections == 3


def test_nobody_listens():
    call = HttpServer("http://127.0.0.1:9").begin("/infer/", BODY, timeout_s=5)
    assert call.is_done()
    with refused("transport-failed", "http://127.0.0.1:9", problem="/infer/: ConnectionRefusedError"):
        call.result()


def test_a_connection_that_breaks_is_an_error_and_nothing_is_sent_again(double):
    double.infer = lambda handler, said: handler.connection.close()
    call = begin(double)
    assert call.is_done(within_s=20)
    for _ in range(2):
        with refused("transport-failed", double.url):
            call.result()
    assert double.asked == ["/infer"]


def test_a_time_limit_counts_from_the_beginning(double):
    may_end = threading.Event()
    double.infer = lambda handler, said: may_end.wait(20)
    call, began = begin(double, timeout_s=0.5), time.monotonic()
    assert not call.is_done(within_s=0.4)
    with refused("call-timeout", double.url) as caught:
        call.result()
    may_end.set()
    assert "/infer/ did not answer within 0.5 s" in caught.value.problem
    assert time.monotonic() - began < 15
    double.infer = double.echo
    assert begin(double, timeout_s=20).result().body


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ("<html>Oops</html>", 200, "reply-malformed", "html"),
        ("out of memory", 500, "server-refused", "500: out of memory"),
        ("x" * 301, 500, "server-refused", "500: " + "x" * 300),
        ({"code": "version-not-newer", "key": "version", "problem": "is 1"}, 409, "version-not-newer", "is 1"),
    ],
)
def test_errors_equal_those_of_a_call_that_is_waited_for(double, body, status, code, words):
    double.infer = lambda handler, said: double.send(handler, body, status)
    with refused(code, problem=words) as caught:
        begin(double).result()
    error = caught.value
    with refused(error.code, error.key) as caught:
        HttpServer(double.url).post("/infer/", BODY, timeout_s=20)
    assert caught.value.problem == error.problem
    assert "x" * 301 not in error.problem
    assert getattr(error, "status", status) == status


def test_key_type_and_the_urls_own_path_go_with_it(double):
    seen = []

    def answer(handler, said):
        seen.append((handler.path, handler.headers["Authorization"], handler.headers["Content-Type"]))
        double.echo(handler, said)

    double.infer, answer_all = answer, double.answer

    def answer_below(handler):
        handler.path, path = handler.path.removeprefix("/rollout"), handler.path
        assert path == "/rollout/infer/"
        answer_all(handler)

    double.answer = answer_below
    assert begin(double, base_url=f"{double.url}/rollout/", api_key="k").result().body
    assert seen == [("/infer/", "Bearer k", "application/json")]


def test_a_server_that_repeats_the_key_does_not_bring_it_into_messages(double):
    double.infer = lambda handler, said: double.send(handler, f"no {handler.headers['Authorization']}, sorry", 403)
    with refused("server-refused", problem="no Bearer ***") as caught:
        HttpServer(double.url, api_key="the-key").post("/infer/", BODY, timeout_s=20)
    assert "the-key" not in str(caught.value) + repr(caught.value)


@responses.activate
@pytest.mark.parametrize("base_url", ["https://far.example/rollout", "http://someone:secret@far.example/rollout"])
def test_what_needs_more_than_a_connection_goes_the_usual_way(base_url):
    shown = base_url.replace("someone:secret@", "")
    responses.post(f"{shown}/infer/", body=b"\x81\xa1a\x01", headers={"Content-Type": MSGPACK})
    server = HttpServer(base_url)
    assert server.base_url == shown  # it stands in messages and in the journal
    assert server.begin("/infer/", BODY, timeout_s=20).result().body == {"a": 1}
    sent = responses.calls[0].request.headers.get("Authorization")
    assert sent == (None if shown == base_url else "Basic c29tZW9uZTpzZWNyZXQ=")
    assert json.loads(responses.calls[0].request.body) == BODY


@responses.activate
def test_a_proxy_of_the_environment_is_used_for_other_machines(double, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    responses.add_passthru(double.url)
    responses.post("http://far.example/infer/", json={"by": "requests, which knows of proxies"})
    assert HttpServer("http://far.example").begin("/infer/", BODY, timeout_s=20).result().body["by"]
    assert begin(double).result().body
    assert len(responses.calls) == 1


@responses.activate
def test_the_innermost_cause_is_found_in_a_circle_too(double):
    one, other = requests.ConnectionError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    responses.post(f"{double.url}/infer/", body=one)
    with refused("transport-failed", problem="RuntimeError: other"):
        in_thread(HttpServer(double.url).post, "/infer/", BODY, timeout_s=20).result(timeout=5)


@pytest.mark.scenario(
    "server-connection/a-reply-that-stopped",
    clauses=["server-connection/a-dead-server-is-noticed-without-a-timeout#3,5"],
)
@pytest.mark.parametrize(
    ("counts", "idle_s", "code"),
    [
        (lambda: 5, None, "call-stalled"),
        (itertools.count().__next__, None, None),
        (itertools.count().__next__, 60.0, "call-stalled"),
        (itertools.count().__next__, 0.1, None),
    ],
)
def test_a_reply_that_stopped_is_noticed_by_the_tokens_that_the_server_counts(double, counts, idle_s, code):
    """``idle_s``: of the call, as the server reports it; another call of the same server stands still throughout."""
    is_over = threading.Event()

    def slow(handler, said):
        is_over.wait(60 if code else 1.5)
        double.echo(handler, said)

    double.infer, double.progress = slow, counts
    known = [] if idle_s is None else double.call_ids
    double.idle_s = lambda: {"another": 60.0} | dict.fromkeys(known, idle_s)
    watch = dataclasses.replace(QUICK, silence_s=30.0, stall_s=0.6 if code else 30.0)
    server = RolloutServer(double.url, ClientSettings(timeout_s=3, watch=watch))
    server.connect()
    server.watch = watch
    if code is None:
        assert len(server.infer(prompts(2), RULES)) == 2
        return
    with refused(code, double.url, problem="(requests 0 and 1)", remedy="stall_timeout_s") as caught:
        server.infer(prompts(2), RULES)
    is_over.set()
    assert is_transient(caught.value)
