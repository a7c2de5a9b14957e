"""The recording server in the native dialect: our own client sends weights and gets rollouts; mistakes are refused."""

from functools import partial

import pytest
import requests
import torch

from conformance.doubles.digits import ROOT
from conformance.judge.calls import RawLearner, Server
from conformance.judge.ports import free_port
from conformance.judge.servers.broken.engine import TinyEngine
from conformance.judge.servers.broken.switches import Switches
from conformance.judge.trainers.arrivals import of_kind
from conformance.judge.trainers.server import RecordingServer, recording
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import AGAIN, NativeSender
from rollmatch.dialects.prompt import Prompt, SamplingRules
from rollmatch.dialects.session import ClientSettings, RolloutServer

MODEL = ROOT / "fixtures/models/tape"
MERGE = {"name": "a", "lora_a": "b", "lora_b": "c", "scaling": 1.0}


@pytest.fixture(scope="module")
def engine():
    return TinyEngine(str(MODEL), Switches())


@pytest.fixture
def server(engine):
    with recording(RecordingServer(engine, "native", dtype="float32"), down_s=0.0) as running:
        yield running


@pytest.fixture
def learner(server):
    learner = RawLearner(Server(server.url), port=free_port(), num_workers=1)
    assert learner.open()[0] == 200
    yield learner
    learner.close()


def prompt(**fields):
    return Prompt(request_id="r", messages=(), prompt_token_ids=(5, 6, 7), images=(), **fields)


def scaled(server, scale):
    return {name: tensor.detach() * scale for name, tensor in server.engine.weights.items()}


def test_our_client_sends_versions_and_gets_rollouts_of_each(server):
    connected = RolloutServer(server.url, ClientSettings(timeout_s=30))
    connected.connect()
    rendezvous = Rendezvous(host="127.0.0.1", port=free_port(), client="learner", timeout_s=30, join_timeout_s=30)
    sender, first = NativeSender([connected], rendezvous, stage=False), dict(server.engine.weights)
    ask, limits = [prompt(seed=1, max_tokens=1), prompt(seed=2)], {"top_k": -1, "repetition_penalty": 1.0}
    rules = SamplingRules(
        max_tokens=8, temperature=1.0, top_p=1.0, stop_token_ids=(), banned_token_ids=(9,), logprobs=True, **limits
    )
    for version in (3, 4, 9):
        sent = {name: tensor.detach() * version for name, tensor in first.items()}
        sender.send(sent.items(), version=version)
        assert all(torch.equal(sent[name], tensor) for name, tensor in server.engine.weights.items())
        replies = connected.infer(ask, rules)
        assert [reply.policy_version for reply in replies] == [version, version]
        assert [len(reply.logprobs) for reply in replies] == [len(reply.response_token_ids) for reply in replies]
        assert len(replies[0].response_token_ids) == 1
        assert {reply.prompt_token_ids for reply in replies} == {(5, 6, 7)}
    sender.close()
    updates = of_kind(server.arrivals.events, "update")
    assert [event["num_tensors"] for event in updates] == 3 * [len(first)]
    assert [call.path.strip("/") for call in server.arrivals.calls].count(AGAIN.strip("/")) == 2
    kinds = [event["kind"] for event in server.arrivals.events]
    assert (kinds.count("open"), kinds[-1]) == (1, "close")


def test_bytes_that_are_not_those_of_the_digests_are_refused_and_the_old_weights_stay(server, learner):
    first = dict(server.engine.weights)
    status, body = learner.sync(scaled(server, 2.0), version=1, sent=scaled(server, 3.0))
    assert (status, "digest" in body["problem"]) == (409, True)
    assert all(torch.equal(first[name], tensor) for name, tensor in server.engine.weights.items())
    assert learner.sync(scaled(server, 2.0), version=1)[0] == 200
    assert len(of_kind(server.arrivals.events, "update")) == 1


def test_what_is_staged_is_served_when_it_is_committed_and_not_when_it_is_dropped(server, learner):
    post, choice = learner.server.post, {"client": "learner"}
    assert learner.sync(scaled(server, 2.0), version=1, commit=False)[1]["committed"] is False
    assert learner.sync(scaled(server, 3.0), version=2)[1]["problem"] == "update-in-progress"
    assert post("/native/sync/drop/", choice) == (200, {"dropped": True})
    assert post("/native/sync/commit/", choice)[1] == {"problem": "nothing-staged"}
    assert learner.sync(scaled(server, 4.0), version=4, commit=False)[0] == 200
    assert learner.server.version == 0
    assert post("/native/sync/commit/", choice)[1]["policy_version"] == learner.server.version == 4
    assert len(of_kind(server.arrivals.events, "update")) == 1


@pytest.mark.parametrize(
    ("route", "fields", "problem"),
    [
        ("/native/communicator/", {"client": "other"}, "client-already-attached"),
        ("/native/communicator/close/", {"client": "other"}, "client-already-attached"),
        ("/native/sync/", {"client": "other"}, "client-already-attached"),
        ("/native/sync/", {"version": 0}, "body-invalid"),
        ("/native/sync/", {"buckets": [1]}, "bucket-invalid"),
        ("/native/sync/", {"adapter": {"merges": [MERGE]}}, "adapter-invalid"),
        ("/native/sync/again/", {"client": "learner", "sync_id": "b", "version": 2, "like": "a"}, "announcement-unkn"),
    ],
)
def test_what_the_dialect_forbids_is_refused(server, learner, route, fields, problem):
    bodies = {
        "/native/communicator/": learner.request_body,
        "/native/sync/": partial(learner.announcement, scaled(server, 2.0), version=1, sync_id="s"),
    }
    status, body = learner.server.post(route, bodies.get(route, dict)(**fields) | fields)
    assert (status, problem in body["problem"]) == (409, True), body
    assert not of_kind(server.arrivals.events, "update")


def test_a_body_that_cannot_be_read_is_a_400(server):
    body = {"requests": [{"prompt_token_ids": [5], "request_id": "r", "images": [3]}], "sampling": {"max_tokens": 1}}
    assert requests.post(f"{server.url}/native/infer/", json=body, timeout=60).status_code == 400
