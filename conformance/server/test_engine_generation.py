"""What the server owes to callers of its generate routes, on a real engine with two replicas."""

import base64
import time
from pathlib import Path

import pytest
import requests as http

from conformance.rollout.digits import load_digits, template_of
from conformance.server.calls import data_url, in_thread, text_batch

pytestmark = pytest.mark.engine
LONG = {"max_tokens": 200, "ignore_eos": True}
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
    batch = {"requests": text_batch([[5]] * 64), "sampling": {"max_tokens": 500, "ignore_eos": True}}
    call = in_thread(server.post_packed, "/native/infer/", batch, timeout=2)
    while not server.health()["running"]:
        time.sleep(0.02)
    with pytest.raises(http.exceptions.RequestException):
        call.result()
    deadline = time.monotonic() + 5
    while server.health()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.infer(text_batch([[5]]), max_tokens=2)[0]


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
