"""One call with as many log-probabilities as the limits allow, and how long others wait for the event loop."""

import time

import psutil
import pytest
import requests

from conformance.doubles.instance import ENGINE, running
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
NUM_LIKELIEST, MAX_BYTES = 1024 * 10 * 21, 300
"""Of one call, and memory for each: objects of vLLM's response classes would take 1,200."""


def ask(server, route, body):
    with requests.post(server.url + route, json=body, timeout=300, stream=True) as reply:
        assert reply.status_code == 200, reply.text
        return sum(map(len, reply.iter_content(1 << 20)))


@pytest.fixture
def memory(instance):
    """Bytes of the server's process."""
    process = psutil.Process(instance.process.pid)
    return lambda: process.memory_info().rss


def watched(server, memory, route, body):
    """What a call costs others: bytes for each likeliest token, and turns of the event loop by their longest time."""
    small = {"sampling_params": body["sampling_params"] | {"n": 1}} if "sampling_params" in body else {"n": 1}
    ask(server, route, body | small)  # imports what serves it
    before, memory_before, most = turns_of(server), memory(), 0
    call = in_thread(ask, server, route, body)
    while not call.done():
        most = max(most, memory())
        assert requests.get(f"{server.url}/get_world_size/", timeout=60).status_code == 200
        time.sleep(0.02)
    assert call.result() > 10**6
    turns = {limit: count - before[limit] for limit, count in turns_of(server).items()}
    return (most - memory_before) / NUM_LIKELIEST, turns


@pytest.mark.scenario(clauses=["rollout-server/a-bad-request-costs-nobody-else-anything#6,10"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_many_log_probabilities_leaves_the_loop_and_memory_to_others(server, memory, name):
    num_bytes, turns = watched(server, memory, *CALLS[name])
    assert num_bytes < MAX_BYTES
    assert turns[HELD_S] >= MOST_OF_TURNS * turns[float("inf")], turns


@pytest.mark.scenario(clauses=["rollout-server/a-bad-request-costs-nobody-else-anything#10"])
def test_log_probabilities_of_prompts_leave_the_loop_and_memory_to_others(server, memory):
    body = {"prompt": [[7] * 500] * 20, "max_tokens": 1, "prompt_logprobs": 20}
    num_bytes, turns = watched(server, memory, "/v1/completions", body)
    assert num_bytes < MAX_BYTES
    assert turns[HELD_S] >= MOST_OF_TURNS * turns[float("inf")], turns


def test_more_likeliest_prompt_tokens_than_there_are_end_no_worker(tmp_path):
    """Of a server whose ``max_logprobs`` allows them."""
    with running(tmp_path / "log", engine_arguments=ENGINE | {"max_logprobs": 10**6}) as instance:
        url, body = f"{instance.url}/v1/completions", {"prompt": [7, 8], "max_tokens": 1}
        refused = requests.post(url, json=body | {"prompt_logprobs": 10**5}, timeout=60)
        assert (refused.status_code, refused.json()["code"]) == (400, "engine-refused")
        found = requests.post(url, json=body | {"prompt_logprobs": 1000}, timeout=60).json()
        assert len(found["choices"][0]["prompt_logprobs"][1]) >= 1000


def test_a_stream_that_is_hung_up_on_frees_the_engine(server):
    with requests.post(
        f"{server.url}/v1/chat/completions", json=CHAT | {"stream": True}, timeout=60, stream=True
    ) as one:
        next(one.iter_content(1))
    deadline = time.monotonic() + 20
    while server.health()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
