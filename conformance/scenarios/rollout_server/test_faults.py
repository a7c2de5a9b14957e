"""Learners and workers that die or fall silent: old weights stay served, a new learner gets in, nobody waits for ever.

As a script (``URL PORT VERSION``) it is a learner that is killed in the middle of a sync.
"""

import os
import signal
import sys
import time

import pytest
import requests

from conformance.doubles.digits import load_model
from conformance.doubles.instance import ENVIRONMENT, Instance, free_port, running, settings_for
from conformance.doubles.processes import is_healthy, start, stopped
from conformance.judge.calls import RawLearner, Server, text_batch
from conformance.judge.servers.bounded import in_thread
from rollmatch.model.checkpoint import merged_weights

pytestmark = pytest.mark.engine


def set_weights(server, weights, *, version):
    learner = RawLearner(server, port=free_port(), client="next")
    assert learner.open()[0] == 200
    assert learner.sync(weights, version=version)[0] == 200
    learner.close()


def settle(server, policies, scene_batch, greedy):
    """A new learner gets in and syncs."""
    set_weights(server, policies[0].weights, version=server.version + 1)
    assert policies[0].wrote(server.infer(scene_batch, **greedy)[0])


@pytest.mark.scenario("weight-sync/a-failed-staged-update-leaves-the-old-weights")
def test_a_learner_killed_in_mid_sync_leaves_the_old_weights(server, policies, scene_batch, greedy, tmp_path):
    before, version = server.infer(scene_batch, **greedy)[0], server.version
    command = [
        sys.executable,
        "-m",
        "conformance.scenarios.rollout_server.test_faults",
        server.url,
        str(free_port()),
        str(version + 1),
    ]
    died = start(command, tmp_path / "log", environment=os.environ | ENVIRONMENT)
    assert died.wait(timeout=90) == -signal.SIGKILL
    began = time.monotonic()
    responses, versions = server.infer(scene_batch, **greedy)
    assert (responses, set(versions)) == (before, {version})
    settle(server, policies, scene_batch, greedy)
    assert time.monotonic() - began < 30


def test_a_learner_that_falls_silent_is_given_up_in_its_own_time(server, policies, scene_batch, greedy):
    before, version = server.infer(scene_batch, **greedy)[0], server.version
    learner = RawLearner(server, port=free_port(), timeout_s=2.0)
    assert learner.open()[0] == 200
    announcement = learner.announcement(policies[1].weights, version=version + 1, sync_id="silent")
    assert learner.announce(announcement) is None
    learner.send(announcement, policies[1].weights, num_buckets=2)
    began = time.monotonic()
    status, body = learner.call.result()
    assert (status, body["code"]) == (409, "transfer-failed")
    assert time.monotonic() - began < 10
    assert (server.infer(scene_batch, **greedy)[0], server.version) == (before, version)
    settle(server, policies, scene_batch, greedy)


def test_a_hang_up_and_the_next_learner_may_be_heard_of_at_once(instance, server):
    """As a busy machine, or a collector's pause, brings it about."""
    lonely, learner = RawLearner(server, port=free_port()), RawLearner(server, port=free_port(), client="next")
    call = in_thread(server.post, "/native/communicator/", lonely.request_body(), timeout=2)
    while "group_members 3.0" not in requests.get(server.url + "/metrics/", timeout=5).text:
        assert not call.done(), "the server has not begun to open the group"
        time.sleep(0.01)
    with stopped(instance.process):
        with pytest.raises(requests.exceptions.ReadTimeout):
            call.result()
        opened = in_thread(learner.open)
        time.sleep(0.1)
    status, body = opened.result()
    assert status == 200, body
    learner.close()


@pytest.fixture(scope="module")
def fragile(tmp_path_factory):
    """A server of its own, for what it does not survive: with placeholder weights and a key."""
    log = tmp_path_factory.mktemp("fragile") / "log"
    with running(log, load_format="dummy", api_key="secret", data_parallel_size=2) as started:
        yield started


@pytest.mark.scenario(
    "rollout-server/placeholder-weights-do-not-answer",
    "rollout-server/placeholder-weights-answer-after-an-update",
    clauses=["rollout-server/every-rollout-names-the-weights-that-made-it#3"],
)
def test_placeholder_weights_do_not_answer_until_a_sync(fragile, policies, scene_batch, greedy):
    server = fragile.server
    assert server.health()["state"] == "weights-not-set"
    for route, body in [
        ("/native/infer/", {"requests": text_batch([[5]]), "sampling": {"max_tokens": 2}}),
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5]}]}),
        ("/generate/", {"prompts": [[5]]}),
    ]:
        status, reply = server.post_packed(route, body)
        assert (status, reply["code"]) == (409, "weights-not-set")
    set_weights(server, policies[1].weights, version=1)
    assert policies[1].wrote(server.infer(scene_batch, **greedy)[0])
    assert server.health()["state"] == "serving"


@pytest.mark.scenario(
    "rollout-server/a-busy-port-is-refused", clauses=["rollout-server/the-server-keeps-to-itself#2,3"]
)
def test_a_busy_http_port_is_refused_and_no_other_taken(fragile, tmp_path):
    second = Instance(settings_for(port=fragile.settings.port), tmp_path / "log")
    try:
        assert second.process.wait(timeout=90) != 0
    finally:
        second.end()
    assert f"[port-in-use] port {fragile.settings.port}" in second.output()
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{fragile.settings.port + 1}/health/", timeout=2)


@pytest.mark.scenario(
    "rollout-server/health-after-a-dead-worker",
    "rollout-server/the-worker-of-a-server-is-killed",
    clauses=["rollout-server/a-server-without-a-worker-ends#1"],
)
def test_a_dead_worker_turns_health_red_and_ends_running_calls(fragile, policies):
    server = fragile.server
    if server.health()["state"] == "weights-not-set":
        set_weights(server, policies[1].weights, version=1)
    long = {"requests": [{"request_id": str(i), "prompt_token_ids": [5]} for i in range(64)]}  # seconds of work
    call = in_thread(server.post, "/native/infer/", long | {"sampling": {"max_tokens": 500, "ignore_eos": True}})
    while not server.health()["running"]:
        assert not call.done(), call.result()
        time.sleep(0.01)
    fragile.workers()[0].kill()
    began = time.monotonic()
    status, body = call.result()
    assert (status, body["code"]) == (503, "worker-dead")
    while is_healthy(fragile.url):
        time.sleep(0.1)
    assert time.monotonic() - began < 10
    assert fragile.process.wait(timeout=90) == 1
    assert "[worker-dead]" in fragile.output()
    fragile.wait_alone(10)


def test_workers_do_not_outlive_a_killed_server(tmp_path):
    """That a signal leaves nothing behind is checked where the shared one ends."""
    with running(tmp_path / "log", load_format="dummy") as killed:
        assert killed.workers()
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait()
        killed.wait_alone(10)


def die_in_mid_sync(url, port, version):
    learner = RawLearner(Server(url), port=int(port), client="dying")
    weights = {name: tensor.clone().mul_(1.5) for name, tensor in merged_weights(load_model())}
    assert learner.open()[0] == 200
    announcement = learner.announcement(weights, version=int(version), sync_id="dying", per_bucket=10)
    assert learner.announce(announcement) is None
    learner.send(announcement, weights, num_buckets=len(announcement["buckets"]) // 2)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_in_mid_sync(*sys.argv[1:])
