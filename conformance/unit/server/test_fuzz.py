"""No body, however wrong, is answered with 5xx, and the server still serves.

``ROLLMATCH_BODIES`` sets how many bodies each dialect gets over all its routes; default 200, with ``ROLLMATCH_STRICT``
500, which are the same in every run; ``python -m conformance.tools.campaign --bodies N`` sends others to a real server.
"""

import os
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from conformance.doubles.fuzzed_bodies import BODIES, calls, calls_in_states, encoded, states_of
from conformance.doubles.stand_in import make_stand_in
from rollmatch.data.ids import pack_ids

NUM_BODIES = int(os.environ.get("ROLLMATCH_BODIES", "500" if "ROLLMATCH_STRICT" in os.environ else "200"))
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


def test_no_body_in_the_midst_of_an_update_does_more_than_it_may(fuzzed, capsys):
    """Of vLLM's routes: what is refused changes neither version nor weights, and hinders no later update."""
    parts, client = fuzzed
    specs, statuses = list(parts.model.tensors.values()), {}
    states = states_of(specs)

    def post(route, body, form="json"):
        raw, kind = encoded(body, form)
        return client.post(route, content=raw, headers={"content-type": kind})

    def read(reply):
        is_packed = reply.headers["content-type"] == "application/msgpack"
        return msgspec.msgpack.decode(reply.content) if is_packed else reply.json()

    def version():
        return client.get("/health/").json()["policy_version"]

    def reach(state):
        """From nothing."""
        replies = [post("/native/communicator/close/", {"force": True}), post("/resume/", {})]
        replies += [post(*call) for call in states[state]]
        assert [reply.status_code for reply in replies] == [200] * len(replies), (state, replies[-1].text)

    @settings(max_examples=NUM_BODIES)
    @given(calls_in_states(specs), st.sampled_from(["json"] * 8 + ["msgpack", "damaged"]))
    def run(drawn, form):
        state, (route, body) = drawn
        reach(state)
        before = version()
        reply = post(route, body, form)
        statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
        assert reply.status_code < 500, (state, route, body, reply.text)
        assert reply.status_code < 400 or {"code", "problem", "remedy"} <= read(reply).keys()
        is_finished = (state, route, reply.status_code) == ("whole", "/finish_weight_update/", 200)
        assert version() == before + is_finished, (state, route, body)

    run()
    for state in states:
        before = version()
        reach(state)
        reach("finished")
        assert version() == before + 1 + (state == "finished")
    assert post("/shutdown_weight_transfer_engine/", {}).status_code == 200
    assert {200, 400, 409, 422} <= statuses.keys()
    with capsys.disabled():
        sys.stdout.write(f"\nvllm, in states: {dict(sorted(statuses.items()))}\n")
