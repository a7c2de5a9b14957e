"""No body, however wrong, is answered with 5xx, and the server still serves.

``ROLLMATCH_BODIES`` sets how many bodies each dialect gets over all its routes; default 200, with ``ROLLMATCH_STRICT``
2,000.
"""

import os
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from conformance.doubles.fuzzed_bodies import BODIES, calls, encoded
from conformance.doubles.stand_in import make_stand_in
from rollmatch.data.ids import pack_ids

NUM_BODIES = int(os.environ.get("ROLLMATCH_BODIES", "2000" if "ROLLMATCH_STRICT" in os.environ else "200"))
UNAVAILABLE = 501
"""What the OpenAI routes say to a body that only vLLM's classes could refuse, where the engines are not vLLM's."""


@pytest.fixture(scope="module")
def fuzzed():
    parts, app = make_stand_in(drain_s=0.01, max_model_len=512)
    with TestClient(app) as client:
        yield parts, client


@pytest.mark.parametrize("dialect", sorted(BODIES))
def test_no_body_is_answered_with_5xx(fuzzed, dialect, capsys):
    parts, client = fuzzed
    statuses = {}

    @settings(max_examples=NUM_BODIES)
    @given(calls(dialect), st.sampled_from(["json"] * 5 + ["msgpack"] * 3 + ["damaged"]))
    def run(call, form):
        route, body = call
        raw, kind = encoded(body, form)
        reply = client.post(route, content=raw, headers={"content-type": kind})
        statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
        if reply.status_code == UNAVAILABLE:
            assert reply.json()["code"] == "openai-unavailable"
        else:
            assert reply.status_code < 500, (route, body, reply.text)

    run()
    for replica in parts.pool.replicas:
        replica.generated.clear()
    assert client.get("/health/").json()["running"] == 0
    packed = {"requests": [{"request_id": "0", "prompt_token_ids": pack_ids([5])}], "sampling": {"max_tokens": 1}}
    reply = client.post(
        "/native/infer/", content=msgspec.msgpack.encode(packed), headers={"content-type": "application/msgpack"}
    )
    assert reply.status_code == 200
    assert statuses.get(200) or statuses[UNAVAILABLE]
    assert statuses[422]
    with capsys.disabled():
        sys.stdout.write(f"\n{dialect}: {dict(sorted(statuses.items()))}\n")
