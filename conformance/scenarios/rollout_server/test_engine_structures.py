"""Structures that are made to cost a real server's engine time, memory or its life."""

import time

import pytest
import requests

from conformance.judge.servers.bounded import in_thread

pytestmark = [pytest.mark.engine, pytest.mark.wide]
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
DEEP = "(" * 30_000 + '"a"' + ")" * 30_000
HOSTILE = [
    {"json": LOOP},
    {"json": {"$ref": "#"}},
    {"json": {"type": "array", "minItems": 10**9, "maxItems": 1}},
    {"grammar": "root ::= root"},
    {"grammar": 'root ::= root "a" | root'},
    {"grammar": f"root ::= {DEEP}"},
    {"grammar": "no grammar"},
    {"regex": "a{0}b^c$d(?!x)[]"},
    {"regex": "(((a{1,999}){1,999}){1,999}){1,999}"},
    {"regex": "(a|b|ab)*" * 400},
    {"choice": ["x" * 4096] * 1024},
    {"choice": []},
    {"structural_tag": "{}"},
]
LONG = [{"regex": "a" * 2**20}, {"choice": ["a"] * 100_000}]
OTHERS_S = 20.0
"""Most that a structured call of another caller waits, on two busy cores."""


def post(server, structured, **fields):
    body = {"prompt": [7, 8], "max_tokens": 4, "structured_outputs": structured} | fields
    began = time.monotonic()
    reply = requests.post(f"{server.url}/v1/completions", json=body, timeout=120)
    return reply.status_code, reply.json(), time.monotonic() - began


@pytest.mark.scenario(
    "rollout-server/a-structure-that-takes-too-much-is-refused",
    clauses=["rollout-server/a-bad-request-costs-nobody-else-anything#7"],
)
def test_hostile_structures_are_refused_by_name_and_others_do_not_wait(server):
    assert post(server, {"regex": "[ab]+"})[0] == 200  # starts what tries structures
    attacks = [in_thread(post, server, structured) for structured in HOSTILE]
    waits = []
    while not all(attack.done() for attack in attacks):
        status, body, seconds = post(server, {"regex": "[ab]+"})
        assert status == 200, body
        waits.append(seconds)
    for structured, attack in zip(HOSTILE, attacks, strict=True):
        status, body, _ = attack.result()
        assert status in (200, 400, 422), (structured, body)
        assert status == 200 or {"code", "problem", "remedy"} <= set(body), (structured, body)
    assert max(waits, default=0.0) < OTHERS_S
    assert post(server, {"choice": ["x" * 4096] * 1024})[1]["code"] == "structure-refused"
    for structured in LONG:
        assert post(server, structured)[:2][0] == 422
    assert server.health()["running"] == 0
