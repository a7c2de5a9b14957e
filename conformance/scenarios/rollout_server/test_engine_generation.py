"""What the server owes to callers of its generate routes, on a real engine with two replicas."""

import base64
import contextlib
import dataclasses
import http.client
import json
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests

from conformance.doubles.digits import load_digits, template_of
from conformance.doubles.learner_side import connected
from conformance.doubles.processes import stopped
from conformance.doubles.swift_double import RULES, prompts
from conformance.judge.calls import data_url, text_batch
from conformance.judge.servers.bounded import in_thread
from rollmatch.dialects.calls import BackgroundCall
from rollmatch.dialects.watch import CallStalled

pytestmark = pytest.mark.engine
"""Eight of these keep the server busy for a second or two."""


@pytest.fixture
def base(server, learner, policies):
    """The model directory's weights, whatever was synced before."""
    if server.version:
        assert learner.sync(policies[0].weights, version=server.version + 1, sync_id="base")[0] == 200
    return policies[0]


def swift_body(sample, images, **config):
    prompts = load_digits().custom.prompts
    messages = [
        {"role": "system", "content": prompts.system},
        {"role": "user", "content": f"<image>{prompts.user}"},
    ]
    sampling = {"max_tokens": 96, "temperature": 0.0, "return_details": True} | config
    requests = [{"messages": messages, "images": [image]} for image in images]
    return {"infer_requests": requests, "request_config": sampling}


def test_swift_renders_messages_to_the_learners_prompt_and_takes_three_forms_of_images(
    server, base, scene_requests, scene_batch, greedy
):
    path = Path(scene_requests[0].sample.images[0])
    forms = [str(path), data_url(path), base64.b64encode(path.read_bytes()).decode()]
    status, entries = server.post("/infer/", swift_body(scene_requests[0].sample, forms))
    assert status == 200, entries
    _, native = server.post_packed("/native/infer/", {"requests": scene_batch[:1], "sampling": greedy})
    prompt = list(memoryview(native["responses"][0]["prompt_token_ids"]).cast("i"))
    for entry in entries:
        choice = entry["response"]["choices"][0]
        assert entry["response"]["prompt_token_ids"] == prompt
        ids = [i for i in choice["token_ids"] if i != template_of().vocabulary.stop_id]
        assert tuple(ids) == base.responses[0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"].startswith('{"objects"')


@pytest.mark.scenario(
    "rollout-server/a-caller-that-hangs-up-frees-the-engine",
    clauses=["rollout-server/a-bad-request-costs-nobody-else-anything#5"],
)
def test_a_caller_that_hangs_up_frees_the_engine(server):
    batch = {"requests": [{"request_id": f"{i}", "prompt_token_ids": [5]} for i in range(64)]}
    body = json.dumps(batch | {"sampling": {"max_tokens": 500, "ignore_eos": True}})
    begun = server.health()["progress"]
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", urlsplit(server.url).port)) as call:
        call.request("POST", "/native/infer/", body, {"Content-Type": "application/json"})
        while not server.health()["running"]:
            time.sleep(0.02)
    while server.health()["running"]:
        time.sleep(0.02)
    assert server.health()["progress"] < begun + 64 * 500
    assert server.infer(text_batch([[5]]), max_tokens=2)[0]


def test_a_bias_decides_a_greedy_response(server):
    (plain,), (biased,) = (
        server.infer(text_batch([[5]]), max_tokens=4, ignore_eos=True, logit_bias=bias)[0] for bias in ({}, {9: 100.0})
    )
    assert biased == (9,) * 4 != plain


def test_a_trainer_reads_the_type_that_weights_are_held_in(server):
    """The server was started with the type ``float``."""
    found = requests.get(f"{server.url}/server_info", timeout=30).json()["vllm_config"]["model_config"]["dtype"]
    assert found == "torch.float32"


@pytest.mark.scenario("rollout-server/a-bad-sampling-value-is-named")
def test_a_bad_item_costs_only_its_own_call(server):
    good = in_thread(server.infer, text_batch([[5]] * 4), max_tokens=200, ignore_eos=True)
    for bad, code, key in [
        ({"requests": text_batch([[5], [6]]), "sampling": {"max_tokens": -1}}, "sampling-value-invalid", "max_tokens"),
        ({"requests": text_batch([[5], [6] * 600, [7]]), "sampling": {"max_tokens": 8}}, "prompt-too-long", None),
    ]:
        status, body = server.post_packed("/native/infer/", bad)
        assert (status, body["code"]) == (400, code)
        assert key is None or body["key"] == key
    assert body["item"] == 1
    assert [len(ids) for ids in good.result()[0]] == [200] * 4
    assert len(server.infer(text_batch([[5], [6] * 40, [7]]), max_tokens=8)[0]) == 3


@pytest.mark.scenario(
    "server-connection/a-reply-that-stopped-beside-others",
    clauses=["server-connection/a-dead-server-is-noticed-without-a-timeout#6"],
)
def test_a_reply_that_stopped_is_noticed_while_another_replica_writes(instance):
    server, client = instance.server, connected(instance.server.url)
    client.watch = dataclasses.replace(client.watch, stall_s=3.0)
    first = min(instance.workers(), key=lambda each: each.create_time())  # its replica gets the first of two calls
    with stopped(first):
        lost = BackgroundCall(lambda: client.infer(prompts(1), RULES))
        while not server.health()["calls"]:
            time.sleep(0.02)
        while not lost.is_done():
            assert len(server.infer(text_batch([[8]]), max_tokens=100, ignore_eos=True)[0][0]) == 100
        with pytest.raises(CallStalled):
            lost.result()
    assert len(client.infer(prompts(1), RULES)) == 1
    while server.health()["running"]:  # what was stopped ends by itself
        time.sleep(0.02)
    assert server.health()["calls"] == {}
