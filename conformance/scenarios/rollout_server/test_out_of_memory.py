"""The kernel kills a server's worker that needs more memory than there is: in a response, and in an update."""

import json
import time

import pytest
import requests

from conformance.doubles.digits import load_model
from conformance.doubles.instance import free_port, running
from conformance.doubles.memory_limit import limited_memory
from conformance.doubles.processes import is_healthy
from conformance.doubles.server_fixtures import held
from conformance.judge.calls import RawLearner, text_batch
from conformance.judge.servers.bounded import in_thread
from rollmatch.model.checkpoint import merged_weights

pytestmark = [pytest.mark.engine, pytest.mark.wide, pytest.mark.memcg]
LONG = {"max_tokens": 500, "ignore_eos": True}
WELL_S, END_S = 10.0, 90.0


@pytest.fixture
def narrow(tmp_path):
    """A server with one worker, and a limit that its worker can be put under."""
    with running(tmp_path / "log", data_parallel_size=1) as started, limited_memory() as limit:
        yield started, limit


def check_ended(server, limit, began):
    """The kernel has killed, health has said so in time, and the server ends by itself."""
    while is_healthy(server.url):
        assert time.monotonic() < began + WELL_S
        time.sleep(0.05)
    assert limit.num_killed() == 1
    assert server.process.wait(timeout=END_S) == 1
    assert "[worker-dead]" in server.output()
    server.wait_alone(WELL_S)


def last_event(server):
    """Of a stream of chat completions, before its end."""
    body = {"messages": [{"role": "user", "content": "a"}], "n": 8, "stream": True} | LONG
    with requests.post(f"{server.url}/v1/chat/completions", json=body, stream=True, timeout=60) as reply:
        events = [line for line in reply.iter_lines() if line.startswith(b"data: {")]
    return json.loads(events[-1].removeprefix(b"data: "))


@pytest.mark.scenario("rollout-server/a-worker-runs-out-of-memory-in-a-response")
def test_a_worker_that_is_killed_for_its_memory_ends_calls_and_streams_by_name(narrow):
    instance, limit = narrow
    server = instance.server
    body = {"requests": text_batch([[5]] * 48), "sampling": LONG}
    stream = in_thread(last_event, instance)
    with held(instance, lambda: server.post_packed("/native/infer/", body), num_tokens=200) as call:
        limit.add(*instance.workers())
    began = time.monotonic()
    status, reply = call.result(timeout=WELL_S)
    assert (status, reply["code"]) == (503, "worker-dead")
    assert stream.result(timeout=WELL_S)["error"]["code"] == "worker-dead"
    check_ended(instance, limit, began)


@pytest.mark.scenario("rollout-server/a-worker-runs-out-of-memory-in-an-update")
def test_a_worker_that_is_killed_for_its_memory_in_an_update_ends_it_by_name(narrow):
    instance, limit = narrow
    weights = dict(merged_weights(load_model()))
    learner = RawLearner(instance.server, port=free_port(), num_workers=1)
    assert learner.open()[0] == 200
    announcement = learner.announcement(weights, version=1, sync_id="1")
    assert learner.announce(announcement) is None
    began = time.monotonic()
    limit.add(*instance.workers())
    in_thread(learner.send, announcement, weights)
    status, reply = learner.call.result(timeout=WELL_S)
    assert (status, reply["code"]) == (503, "worker-dead")
    check_ended(instance, limit, began)
