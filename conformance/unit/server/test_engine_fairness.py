"""One call with as many log-probabilities as the limits allow, and how long others wait for the event loop."""

import time

import pytest
import requests

from conformance.doubles.server_fixtures import HELD_S, MOST_OF_TURNS, turns_of
from conformance.judge.servers.bounded import in_thread

pytestmark = [pytest.mark.engine, pytest.mark.wide]
LARGE = {"n": 1024, "max_tokens": 10, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, **LARGE}
CALLS = {
    "chat, streamed": ("/v1/chat/completions", CHAT | {"stream": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "completion": ("/v1/completions", LARGE | {"prompt": [7, 8], "logprobs": 20}),
    "token ids": ("/inference/v1/generate", {"token_ids": [7, 8], "sampling_params": LARGE | {"logprobs": 20}}),
}


def ask(server, route, body):
    with requests.post(server.url + route, json=body, timeout=300, stream=True) as reply:
        assert reply.status_code == 200, reply.text
        return sum(map(len, reply.iter_content(1 << 20)))


@pytest.mark.scenario(clauses=["rollout-server/a-bad-request-costs-nobody-else-anything#6"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_a_million_log_probabilities_leaves_the_loop_to_others(server, name):
    route, body = CALLS[name]
    small = {"sampling_params": body["sampling_params"] | {"n": 1}} if "sampling_params" in body else {"n": 1}
    ask(server, route, body | small)  # imports what serves it
    before = turns_of(server)
    call = in_thread(ask, server, route, body)
    while not call.done():
        assert requests.get(f"{server.url}/get_world_size/", timeout=60).status_code == 200
        time.sleep(0.02)
    assert call.result() > 10**6
    turns = {limit: count - before[limit] for limit, count in turns_of(server).items()}
    assert turns[HELD_S] >= MOST_OF_TURNS * turns[float("inf")], turns


def test_a_stream_that_is_hung_up_on_frees_the_engine(server):
    with requests.post(
        f"{server.url}/v1/chat/completions", json=CHAT | {"stream": True}, timeout=60, stream=True
    ) as one:
        next(one.iter_content(1))
    deadline = time.monotonic() + 20
    while server.health()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
