"""The judge before servers that would harm it: replies without end, byte by byte, elsewhere, or too deep."""

import json
import time
from contextlib import suppress

import pytest
import requests

from conformance.doubles.hostile import (
    NESTED,
    around,
    away,
    begin,
    endless,
    moved_without_end,
    nested,
    packed,
    slow,
    slow_head,
)
from conformance.doubles.http_server import http_server, send
from conformance.doubles.judge_wheel import judge
from conformance.judge.servers.bounded import REPLY_BYTES, Allowance, Unbounded, fetch
from conformance.judge.servers.dialects import DIALECTS

ROUTES = DIALECTS["trl"]().routes
HOSTILE = [endless, slow, slow_head, around, away, moved_without_end, nested, packed]


@pytest.fixture(params=HOSTILE)
def hostile(request):
    """What it does, its URL, and the calls that came to another port."""
    came = []

    def answer(handler):
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        if handler.path == "/openapi.json":
            send(handler, 200, {"paths": {route: {} for route in ROUTES}})
        elif handler.path == "/generate/":
            with suppress(OSError):  # the caller has had enough
                request.param(handler, other.url)
        else:
            send(handler, 200, {"world_size": 1})

    def elsewhere(handler):
        came.append(handler.path)
        send(handler, 200, {})

    with http_server(elsewhere) as other, http_server(answer) as server:
        yield request.param, server.url, came


OUTCOMES = dict.fromkeys((endless, around, away, moved_without_end), Unbounded)
OUTCOMES |= dict.fromkeys((slow, slow_head), requests.ReadTimeout)


@pytest.mark.scenario(clauses=["judging/no-server-harms-the-judge#1,2,3"])
def test_a_call_is_bounded(hostile):
    how, url, came = hostile
    began, allowance = time.monotonic(), Allowance()
    words = {"timeout_s": 2.0, "allowance": allowance, "headers": {}, "json": {}}
    if how in OUTCOMES:
        with pytest.raises(OUTCOMES[how]):
            fetch("POST", f"{url}/generate/", **words)
    else:
        reply = fetch("POST", f"{url}/generate/", **words)
        assert isinstance(reply.value, str)
        assert len(reply.body) <= max(2 * NESTED, 1 << 15)
    assert time.monotonic() - began < 5
    assert Allowance().left - allowance.left < REPLY_BYTES + (1 << 17)
    assert came == []


def test_what_a_run_has_read_counts_together():
    def answer(handler):
        begin(handler)
        handler.wfile.write(b"1" * 1000)

    with http_server(answer) as server:
        words = {"timeout_s": 5.0, "allowance": Allowance(1500), "headers": {}}
        assert fetch("GET", server.url, **words).value == int("1" * 1000)
        with pytest.raises(Unbounded):
            fetch("GET", server.url, **words)


@pytest.mark.wide
@pytest.mark.scenario("judging/a-hostile-server")
@pytest.mark.parametrize("hostile", [how for how in HOSTILE if how is not slow_head], indirect=True)
def test_a_hostile_server_is_not_judged(hostile, installed, tmp_path):
    _, url, came = hostile
    began = time.monotonic()
    code, output = judge(installed, tmp_path, url, "--json", "r.json")
    assert (code, came) == (4, []), output
    assert time.monotonic() - began < 75
    assert json.loads((tmp_path / "r.json").read_text())["preflight"]["problem"]
