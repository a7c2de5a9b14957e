"""What the server takes and what it refuses, item and field named, over pretending engines."""

import base64
import io
import json
import os
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from PIL import Image

from conformance.doubles.digits import requests_for, scenes
from conformance.doubles.request_bodies import SAMPLING, batch
from conformance.doubles.stand_in import STOP, refusal
from rollmatch.config.limits import LimitsConfig
from rollmatch.data.ids import pack_ids, unpack_ids
from rollmatch.dialects.swift.bodies import SwiftInferRequest, SwiftRequestConfig
from rollmatch.dialects.swift.routes import generate_requests

IMAGE = 414


@pytest.fixture
def num_drawn(stand_in):
    return lambda: sum(len(replica.generated) for replica in stand_in[0].pool.replicas)


def scene_image():
    return scenes()[0].images[0]


def with_image(value):
    request = requests_for(scenes()[:1])[0]
    ids = [5, IMAGE, 6]
    assert IMAGE in request.prompt_token_ids
    return {"requests": [{"request_id": "0", "prompt_token_ids": ids, "images": [value]}], "sampling": SAMPLING}


def test_json_and_msgpack_say_the_same(stand_in):
    _, client = stand_in
    returned = client.post("/native/infer/", json=batch([5, 6], [9], logprobs=True)).json()
    packed = {
        "requests": [{"request_id": "0", "prompt_token_ids": pack_ids([5, 6])}],
        "sampling": SAMPLING | {"logprobs": True},
    }
    reply = client.post(
        "/native/infer", content=msgspec.msgpack.encode(packed), headers={"content-type": "application/msgpack"}
    )
    assert reply.headers["content-type"] == "application/msgpack"
    first, other = returned["responses"][0], msgspec.msgpack.decode(reply.content)["responses"][0]
    assert first["response_token_ids"] == unpack_ids(other["response_token_ids"]).tolist() == [6, 6, STOP]
    assert first["logprobs"] == np.frombuffer(other["logprobs"], "<f4").tolist() == [-1.0] * 3
    assert (first["finish_reason"], first["stop_token_id"], first["policy_version"]) == ("stop", STOP, 0)


@pytest.mark.scenario(
    "rollout-server/a-bad-sampling-value-is-named",
    "rollout-server/a-prompt-that-is-too-long-is-named",
    "rollout-server/a-prompt-that-fits-is-served",
    clauses=["rollout-server/a-bad-request-costs-nobody-else-anything#1,2,3"],
)
@pytest.mark.parametrize(
    ("body", "status", "code", "key", "item"),
    [
        (batch([5], max_tokens=-1), 400, "sampling-value-invalid", "max_tokens", None),
        (batch([5], max_tokens=0), 400, "sampling-value-invalid", "max_tokens", None),
        (batch([5], temperature=-0.1), 400, "sampling-value-invalid", "temperature", None),
        (batch([5], temperature=2.1), 400, "sampling-value-invalid", "temperature", None),
        (batch([5], max_tokens=3, min_tokens=4), 400, "sampling-value-invalid", "min_tokens", None),
        (batch([5], top_p=0), 400, "sampling-value-invalid", "top_p", None),
        (batch([5], top_k=-2), 400, "sampling-value-invalid", "top_k", None),
        (batch([5], nonsense=1), 400, "sampling-value-invalid", "nonsense", None),
        ({"requests": batch([5])["requests"]}, 400, "sampling-value-invalid", "max_tokens", 0),
        (batch([5], [6] * 80, [7, 8]), 400, "prompt-too-long", "requests[1]", 1),
        (batch([5], [6] * 62, [7]), 400, "prompt-too-long", "requests[1]", 1),
        (batch([5], [4000]), 400, "token-id-invalid", "requests[1].prompt_token_ids", 1),
        (batch([5], []), 400, "prompt-missing", "requests[1].prompt_token_ids", 1),
        ({"requests": [{"request_id": "0"}], "sampling": SAMPLING}, 400, "prompt-missing", "requests[0]", 0),
        (batch([5], [IMAGE, 6]), 400, "images-misfit", "requests[1].images", 1),
        ({"requests": [{"prompt_token_ids": [5]}]}, 422, "body-invalid", "requests[0].request_id", None),
        (batch(["a"]), 422, "body-invalid", "requests[0].prompt_token_ids", None),
        (batch([-1]), 422, "body-invalid", "requests[0].prompt_token_ids", None),
        ({"request": []}, 422, "body-invalid", "requests", None),
    ],
)  # fmt: skip
def test_a_bad_call_is_refused_whole_and_a_good_one_served(post, num_drawn, body, status, code, key, item):
    returned_status, returned = post("/native/infer/", body)
    assert (returned_status, returned["code"], returned["key"]) == (status, code, key)
    assert item is None or returned["item"] == item
    assert returned["remedy"]
    assert code in returned["detail"]
    assert num_drawn() == 0
    assert post("/native/infer/", batch([5], [6] * 61, [8], max_tokens=3, temperature=0.1, top_p=1, top_k=-1))[0] == 200
    assert num_drawn() == 3
    assert post("/native/infer/", batch([5], [6] * 40, [8], max_tokens=3, min_tokens=3, temperature=2.0))[0] == 200


def test_two_requests_of_one_name_are_refused(post):
    items = [{"request_id": "a", "prompt_token_ids": [5]}, {"request_id": "a", "prompt_token_ids": [6]}]
    returned = refusal(post("/native/infer/", {"requests": items, "sampling": SAMPLING}), "code", "key", "item")
    assert returned == (400, "request-id-repeated", "requests[1].request_id", 1)


def test_what_the_engine_refuses_names_the_item(post):
    assert refusal(post("/native/infer/", batch([5], [6], [7])), "code", "item") == (400, "engine-refused", 2)
    assert post("/native/infer/", batch([5], [6], [8]))[0] == 200


def test_undecodable_bodies_and_unknown_routes_are_refused(stand_in):
    _, client = stand_in
    for headers in ({"content-type": "application/msgpack"}, {"content-type": "application/json"}):
        reply = client.post("/native/infer/", content=b"\xc1{", headers=headers)
        assert reply.status_code == 422
        returned = (msgspec.msgpack if "msgpack" in headers["content-type"] else msgspec.json).decode(reply.content)
        assert (returned["code"], returned["key"]) == ("body-invalid", "body")
    assert client.post("/no_such_route/").json()["code"] == "route-unknown"
    reply = client.get("/native/infer/")
    assert (reply.status_code, reply.json()["code"]) == (405, "method-not-allowed")


def encoded():
    with open(scene_image(), "rb") as file:
        return base64.b64encode(file.read()).decode()


@pytest.mark.scenario(
    "rollout-server/a-path-below-a-root-is-accepted",
    "rollout-server/a-data-url-needs-no-root",
    clauses=["rollout-server/images-come-from-where-the-operator-allows#1"],
)
@pytest.mark.parametrize(
    ("form", "fields"),
    [
        (scene_image, {}),
        (lambda: f"file://{scene_image()}", {}),
        (encoded, {"image_roots": ()}),
        (lambda: f"data:image/png;base64,{encoded()}", {"image_roots": ()}),
    ],
)
def test_an_image_comes_as_path_data_url_or_base64(start, form, fields):
    parts, post, _ = start(max_model_len=512, **fields)
    assert post("/native/infer/", with_image(form()))[0] == 200
    (draw,) = [draw for replica in parts.pool.replicas for draw in replica.generated]
    assert (draw.prompt.images[0].mode, draw.prompt.token_ids) == ("RGB", [5, IMAGE, 6])
    assert draw.prompt.expanded_len == 2 + 1 + parts.prompts._images.growth((draw.prompt.images[0].size,)) > 10


@pytest.mark.parametrize(("asked", "given"), [(3, 3), (4, 4), (5, 4)])
def test_trl_gets_as_many_tokens_as_fit(stand_in, post, asked, given):
    prompt = [5] * (stand_in[0].settings.max_model_len - 4)
    assert post("/generate/", {"prompts": [prompt], "max_tokens": asked})[1]["completion_ids"] == [
        [5] * (given - 1) + [STOP]
    ]


@pytest.mark.parametrize("num_places", [1, 2, 7])
def test_trl_may_send_a_placeholder_for_each_embedding_of_an_image(start, num_places):
    parts, post, _ = start(max_model_len=512)
    prompt = [5, *[IMAGE] * num_places, 6, 6]
    assert post("/generate/", {"prompts": [prompt], "images": [[encoded()]]})[0] == 200
    (draw,) = [draw for replica in parts.pool.replicas for draw in replica.generated]
    assert draw.prompt.token_ids == [5, IMAGE, 6, 6]


@pytest.mark.scenario(
    "rollout-server/a-path-outside-the-roots-is-refused",
    clauses=["rollout-server/images-come-from-where-the-operator-allows#2"],
)
@pytest.mark.parametrize(
    ("value", "status", "code"),
    [
        (lambda root: f"{root}/../train.jsonl", 403, "image-path-outside-roots"),
        (lambda root: "/etc/hostname.png", 403, "image-path-outside-roots"),
        (lambda root: "file:///etc/passwd", 403, "image-path-outside-roots"),
        (lambda root: "/etc/passwd", 403, "image-path-outside-roots"),
        (lambda root: f"{root}/missing.png", 400, "image-unreadable"),
        (lambda root: "http://127.0.0.1:1/a.png", 400, "image-url-refused"),
        (lambda root: "data:image/png;base64,AAAA", 400, "image-unreadable"),
        (lambda root: "iVBORw0KGgoAAAA", 400, "image-unreadable"),
    ],
)
def test_an_image_from_elsewhere_or_none_at_all_is_refused(post, stand_in, num_drawn, value, status, code):
    (root,) = stand_in[0].settings.image_roots
    returned = refusal(post("/native/infer/", with_image(value(root))), "code", "key", "item")
    assert returned == (status, code, "requests[0].images[0]", 0)
    assert num_drawn() == 0


@pytest.mark.parametrize("size", [(6184, 30), (1, 300)])
def test_an_image_that_is_too_narrow_for_the_model_is_refused(post, num_drawn, size):
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    returned_status, returned = post("/native/infer/", with_image(base64.b64encode(file.getvalue()).decode()))
    found = (returned_status, returned["code"], returned["key"], returned["item"])
    assert found == (400, "image-unreadable", "requests[0].images", 0)
    assert num_drawn() == 0


def test_a_file_of_an_image_may_be_as_long_as_a_body(start):
    size = os.path.getsize(scene_image())
    for limit, status in ((size, 200), (size - 1, 400)):
        _, post, _ = start(max_model_len=512, limits=LimitsConfig(max_body_bytes=limit))
        assert post("/native/infer/", with_image(scene_image()))[0] == status


def test_a_link_out_of_the_roots_is_seen_through(start, tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root/link.png").symlink_to(scene_image())
    _, post, _ = start(image_roots=(str(tmp_path / "root"),))
    status, code, _ = refusal(post("/native/infer/", with_image(f"{tmp_path}/root/link.png")))
    assert (status, code) == (403, "image-path-outside-roots")


def test_swift_renders_tags_parts_and_unplaced_images_alike(stand_in):
    parts, _ = stand_in
    image = encoded()
    forms = [
        ({"role": "user", "content": "<image>Look."}, [image]),
        ({"role": "user", "content": "Look."}, [image]),
        ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Look."}]}, [image]),
        ({"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Look."}]}, []),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
                                      {"type": "text", "text": "Look."}]}, []),
        ({"role": "user", "content": "<image>Look."}, [{"bytes": image, "path": None}]),
    ]  # fmt: skip
    prompts = []
    for message, images in forms:
        chat = [{"role": "system", "content": "Speak."}, message, {"role": "user", "content": "More."}]
        made = SwiftInferRequest.model_validate_json(json.dumps({"messages": chat, "images": images}))
        (request,) = generate_requests([made], SwiftRequestConfig(), defaults={}, special_ids={})
        prompt = parts.prompts.make(request, parts.prompts.reader.budget(), item=0)
        assert len(prompt.images) == 1
        prompts.append(prompt.token_ids)
    assert all(ids == prompts[0] for ids in prompts)
    assert prompts[0].count(IMAGE) == 1


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user"}], [{"content": "x", "role": "user"}, {"role": "user", "content": [{"type": "image"}]}]],
)
def test_messages_that_cannot_be_rendered_are_refused(post, messages):
    returned = refusal(post("/infer/", {"infer_requests": [{"messages": messages}]}))
    assert returned == (400, "messages-invalid", "infer_requests[0].messages")


CALLS = [{"type": "function", "function": {"name": "look", "arguments": {"at": "cat"}}}]


@pytest.mark.scenario(clauses=["server-dialects/the-trl-dialect-serves-trl-and-verifiers-trainers#11"])
@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["no content", "null"])
def test_a_message_that_only_calls_tools_needs_no_content(post, content):
    """As OpenAI's clients send back what they got."""

    def chat(fields):
        called = {"role": "assistant", "tool_calls": CALLS, **fields}
        return [{"role": "user", "content": "What is it?"}, called, {"role": "tool", "content": "a cat"}]

    def prompts(fields):
        status, sampled = post("/chat/", {"messages": [chat(fields)]})
        details = {"request_config": {"return_details": True}}
        _, (inferred,) = post("/infer/", {"infer_requests": [{"messages": chat(fields)}]} | details)
        assert status == 200
        return [*sampled["prompt_ids"], inferred["response"]["prompt_token_ids"]]

    assert prompts(content) == prompts({"content": ""})
    silent = [{"role": "assistant", **content}, {"role": "user", "content": "What is it?"}]
    assert refusal(post("/chat/", {"messages": [silent]})) == (400, "messages-invalid", "messages[0].messages")


def test_swift_seeds_count_up_and_zero_means_none(stand_in):
    parts, client = stand_in
    for seed, wanted in ((5, [5, 6, 7]), (0, [None] * 3), (None, [None] * 3)):
        body = {
            "infer_requests": [{"prompt_token_ids": [i + 8]} for i in range(3)],
            "request_config": {"seed": seed, "max_tokens": 2},
        }
        assert client.post("/infer/", json=body).status_code == 200
        draws = sorted((d for r in parts.pool.replicas for d in r.generated), key=lambda d: d.prompt.token_ids)
        assert [draw.params.seed for draw in draws] == wanted
        for replica in parts.pool.replicas:
            replica.generated.clear()


def test_swift_hides_ids_unless_details_are_requested(post):
    for details in (False, True):
        config = {"max_tokens": 2, "return_details": details, "n": 2, "logprobs": True}
        status, (entry,) = post(
            "/infer/", {"infer_requests": [{"prompt_token_ids": [9], "uuid": "u"}], "request_config": config}
        )
        choices = entry["response"]["choices"]
        assert (status, len(choices), entry["rollout_infos"]["uuid"]) == (200, 2, "u")
        assert choices[0]["token_ids"] == ([9, STOP] if details else None)
        assert entry["response"]["prompt_token_ids"] == ([9] if details else None)
        assert [part["logprob"] for part in choices[0]["logprobs"]["content"]] == [-1.0, -1.0]


def test_trl_refuses_what_it_does_not_know_by_name(post):
    for bad, key in (({"max_tokens": 0}, "max_tokens"), ({"generation_kwargs": {"foo": 1}}, "foo"), ({"n": 0}, "n")):
        assert refusal(post("/generate/", {"prompts": [[5]]} | bad)) == (400, "sampling-value-invalid", key)
    assert post("/generate/", {"prompts": [[5]], "generation_kwargs": {"seed": 3}})[0] == 200
    assert post("/generate/", {"prompts": ["a text"], "logprobs": None})[1]["logprobs"] is None


def test_trainers_of_verifiers_learn_that_nothing_is_left_to_do(stand_in, post):
    assert post("/get_num_background_tasks/") == (200, {"num_background_tasks": 0})
    parts, _ = stand_in
    waiting = threading.Event()
    parts.chunked._following = SimpleNamespace(done=waiting.is_set)
    assert post("/get_num_background_tasks/")[1] == {"num_background_tasks": 1}
    waiting.set()
    assert post("/get_num_background_tasks/")[1] == {"num_background_tasks": 0}
