"""What one caller may cost, and who may call: refused with 4xx before anything is decoded, tokenised or generated."""

import base64
import dataclasses
import io
import os

import pytest
from PIL import Image
from starlette.testclient import TestClient

from conformance.server.stand_in import make_parts, make_stand_in
from rollmatch.config.limits import LimitsConfig
from rollmatch.errors import LaunchError
from rollmatch.server.access import check_exposure
from rollmatch.server.settings import settings_from_json

IMAGE = 414


def served(**limits):
    """A client of a server with these limits, and its parts."""
    parts, app = make_stand_in(max_model_len=512, limits=LimitsConfig(**limits))
    return parts, TestClient(app)


def call(client, route, body):
    reply = client.post(route, json=body)
    told = reply.json() if reply.status_code != 200 else {}
    return reply.status_code, told.get("code"), told.get("key")


def ids_of(count, *, length=1):
    return [[5] * length] * count


def native(prompts, **fields):
    requests = [{"request_id": str(i), "prompt_token_ids": ids} | fields for i, ids in enumerate(prompts)]
    return {"requests": requests, "sampling": {"max_tokens": 1}}


def picture(width, height, kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("limits", "route", "over", "within"),
    [
        ({"max_prompts_per_call": 3}, "/native/infer/", native(ids_of(4)), native(ids_of(3))),
        ({"max_prompts_per_call": 3}, "/generate/", {"prompts": ids_of(4)}, {"prompts": ids_of(3)}),
        (
            {"max_prompts_per_call": 1},
            "/infer/",
            {"infer_requests": [{"prompt_token_ids": [5]}] * 2},
            {"infer_requests": [{"prompt_token_ids": [5]}]},
        ),
        ({"max_responses_per_prompt": 4}, "/generate/", {"prompts": [[5]], "n": 5}, {"prompts": [[5]], "n": 4}),
        (
            {"max_responses_per_prompt": 4},
            "/infer/",
            {"infer_requests": [{"prompt_token_ids": [5]}], "request_config": {"n": 5}},
            {"infer_requests": [{"prompt_token_ids": [5]}], "request_config": {"n": 4}},
        ),
        (
            {"max_responses_per_call": 6},
            "/generate/",
            {"prompts": ids_of(2), "n": 4},
            {"prompts": ids_of(2), "n": 3},
        ),
        (
            {"max_tokens_per_call": 100},
            "/native/infer/",
            native(ids_of(2, length=51)),
            native(ids_of(2, length=50)),
        ),
        (
            {"max_images_per_call": 1},
            "/native/infer/",
            native([[IMAGE, 5]] * 2, images=[picture(32, 32)]),
            native([[IMAGE, 5]], images=[picture(32, 32)]),
        ),
    ],
)
def test_a_call_above_a_limit_is_refused_and_one_at_it_served(limits, route, over, within):
    parts, client = served(**limits)
    with client:
        assert call(client, route, over)[:2] == (422, "call-too-large")
        assert not any(replica.generated for replica in parts.pool.replicas)
        assert call(client, route, within)[0] == 200


def test_a_million_responses_are_refused_before_a_prompt_is_made(monkeypatch):
    parts, client = served()
    monkeypatch.setattr(parts.prompts, "make", None)
    with client:
        assert call(client, "/generate/", {"prompts": [[5]], "n": 10**6}) == (422, "call-too-large", "n")


@pytest.mark.parametrize("route", ["/generate/", "/infer/"])
def test_long_text_is_not_tokenised(monkeypatch, route):
    parts, client = served(max_text_bytes=2000)
    text = "\u00e9" * 1001
    body = {"prompts": [text]} if route == "/generate/" else {"infer_requests": [{"messages": [user(text)]}]}
    monkeypatch.setattr(parts.prompts, "tokenizer", Untouched(parts.prompts.tokenizer))
    with client:
        assert call(client, route, body)[:2] == (400, "prompt-too-long")


def user(text):
    return {"role": "user", "content": text}


class Untouched:
    """A tokenizer that renders, but must not encode."""

    def __init__(self, tokenizer):
        self.apply_chat_template = tokenizer.apply_chat_template


def test_pixels_are_counted_before_they_are_decoded(monkeypatch):
    _, client = served(max_pixels_per_image=4096, max_pixels_per_call=6000)
    two = native([[IMAGE, 5]] * 2, images=[picture(64, 64)])
    with client:
        assert call(client, "/native/infer/", two) == (413, "image-too-large", "requests[1].images[0]")
        monkeypatch.setattr(Image.Image, "convert", None)
        one = native([[IMAGE, 5]], images=[picture(65, 64)])
        assert call(client, "/native/infer/", one) == (413, "image-too-large", "requests[0].images[0]")


@pytest.mark.parametrize(("kind", "status"), [("PNG", 200), ("JPEG", 200), ("WEBP", 200), ("TIFF", 400), ("PPM", 400)])
def test_only_listed_formats_are_decoded(kind, status):
    _, client = served()
    image = f"data:image/x;base64,{picture(32, 32, kind)}"
    with client:
        assert client.post("/native/infer/", json=native([[IMAGE, 5]], images=[image])).status_code == status


def test_a_pipe_below_a_root_is_no_image(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    _, app = make_stand_in(max_model_len=512, image_roots=(str(tmp_path),))
    with TestClient(app) as client:
        told = call(client, "/native/infer/", native([[IMAGE, 5]], images=[str(tmp_path / "a.png")]))
    assert told[:2] == (400, "image-unreadable")


def test_large_bodies_are_refused_announced_or_not():
    _, client = served(max_body_bytes=1000)

    def chunks():
        for _ in range(3):
            yield b" " * 500

    with client:
        reply = client.post("/native/infer/", json={"x": "y" * 1000})
        assert (reply.status_code, reply.json()["code"]) == (413, "body-too-large")
        reply = client.post("/native/infer/", content=chunks(), headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["code"]) == (413, "body-too-large")
        assert client.post("/generate/", json={"prompts": [[5]]}).status_code == 200


def test_a_full_queue_is_429():
    parts, client = served(max_waiting_responses=3)
    with client:
        parts.pool._loads[0] = 2
        assert call(client, "/generate/", {"prompts": [[5]], "n": 2})[:2] == (429, "server-busy")
        assert client.post("/generate/", json={"prompts": [[5]]}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 200, None),
        ({"host": "localhost:8000"}, 200, None),
        ({"host": "[::1]:8000"}, 200, None),
        ({"host": "evil.example"}, 403, "host-refused"),
        ({"host": "["}, 403, "host-refused"),
        ({"origin": "http://evil.example"}, 403, "origin-refused"),
        ({"origin": "null"}, 403, "origin-refused"),
        ({"origin": "http://127.0.0.1:3000"}, 200, None),
        ({"content-type": "text/plain"}, 415, "content-type-refused"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "content-type-refused"),
        ({"content-type": "application/json; charset=utf-8"}, 200, None),
    ],
)
def test_without_a_key_pages_of_other_sites_are_refused(headers, status, code):
    _, client = served()
    with client:
        sent = {"content-type": "application/json"} | headers
        reply = client.post("/generate/", content=b'{"prompts": [[5]]}', headers=sent)
        assert (reply.status_code, reply.json().get("code")) == (status, code)
        if status == 403:
            assert client.post("/close_communicator/", headers=headers).status_code == 403


def test_with_a_key_any_host_name_is_good():
    _, app = make_stand_in(api_key="secret")
    with TestClient(app) as client:
        sent = {"host": "node7", "authorization": "Bearer secret"}
        assert client.get("/get_world_size/", headers=sent).status_code == 200
        assert client.get("/get_world_size/", headers={"host": "node7"}).status_code == 401


@pytest.mark.parametrize(
    ("fields", "is_allowed"),
    [
        ({"host": "127.0.0.1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "node7"}, False),
        ({"host": "0.0.0.0", "api_key": "k"}, True),
        ({"host": "0.0.0.0", "allow_no_key": True}, True),
    ],
)
def test_an_open_address_wants_a_key_or_a_word(fields, is_allowed):
    settings = make_parts(**fields).settings
    if is_allowed:
        check_exposure(settings)
    else:
        with pytest.raises(LaunchError) as caught:
            check_exposure(settings)
        assert caught.value.code == "open-without-key"


def test_settings_travel_without_their_key():
    settings = make_parts(api_key="secret", limits=LimitsConfig(max_body_bytes=7)).settings
    text = settings.to_json()
    assert "secret" not in text + repr(settings)
    assert settings_from_json(text, api_key="secret") == settings
    assert settings_from_json(text, api_key=None) == dataclasses.replace(settings, api_key=None)


@pytest.mark.parametrize(
    ("route", "body", "status", "code"),
    [
        ("/generate/", {"prompts": [[2**31]]}, 422, "body-invalid"),
        ("/generate/", {"prompts": [[-1]]}, 422, "body-invalid"),
        ("/generate/", {"prompts": [[5]], "what_else": 1}, 422, "body-invalid"),
        ("/generate/", {"prompts": [[5]], "structured_outputs_regex": "a+"}, 422, "body-invalid"),
        ("/generate/", {"prompts": [[5]], "structured_outputs_regex": None}, 200, None),
        ("/generate/", {"prompts": [[5]], "images": []}, 200, None),
        ("/generate/", {"prompts": [[5], [6]], "images": [None]}, 422, "body-invalid"),
        ("/generate/", {"prompts": [[5]], "generation_kwargs": {"seed": "x"}}, 400, "sampling-value-invalid"),
        ("/generate/", {"prompts": [[5]], "generation_kwargs": {"seed": 2**63}}, 400, "sampling-value-invalid"),
        ("/generate/", {"prompts": [[5]], "generation_kwargs": {"stop": [1]}}, 400, "sampling-value-invalid"),
        ("/generate/", {"prompts": [[5]], "generation_kwargs": {"stop": ""}}, 400, "sampling-value-invalid"),
        ("/generate/", {"prompts": [[5]], "generation_kwargs": {"stop_token_ids": "x"}}, 400, "sampling-value-invalid"),
        ("/generate/", {"prompts": [[5]], "generation_kwargs": {"logit_bias": [1]}}, 400, "sampling-value-invalid"),
        (
            "/generate/",
            {"prompts": [[5]], "generation_kwargs": {"logit_bias": dict.fromkeys(map(str, range(1025)), 1.0)}},
            400,
            "sampling-value-invalid",
        ),
        (
            "/generate/",
            {"prompts": [[5]], "generation_kwargs": {"logit_bias": {"9999": 1.0}}},
            400,
            "sampling-value-invalid",
        ),
        (
            "/generate/",
            {"prompts": [[5]], "generation_kwargs": {"stop_token_ids": [9999]}},
            400,
            "sampling-value-invalid",
        ),
        ("/generate/", {"prompts": [[5]], "top_k": 2**31}, 400, "sampling-value-invalid"),
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5], "images": [{"bytes": 3}]}]}, 422, "body-invalid"),
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5], "images": [{"path": []}]}]}, 422, "body-invalid"),
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5], "colour": 1}]}, 422, "body-invalid"),
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5], "tools": [{}]}]}, 422, "body-invalid"),
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5], "tools": []}]}, 200, None),
        (
            "/infer/",
            {"infer_requests": [{"prompt_token_ids": [5]}], "request_config": {"num_beams": 1, "stream": False}},
            200,
            None,
        ),
        (
            "/infer/",
            {"infer_requests": [{"prompt_token_ids": [5]}], "request_config": {"num_beams": 2}},
            400,
            "sampling-value-invalid",
        ),
        ("/native/infer/", native([[5]], seed=2**63), 422, "body-invalid"),
    ],
)
def test_wrong_fields_are_4xx_in_every_dialect(route, body, status, code):
    parts, client = served()
    with client:
        assert call(client, route, body)[:2] == (status, code)
        if status != 200:
            assert not any(replica.generated for replica in parts.pool.replicas)


@pytest.mark.parametrize(
    "raw", [b'{"prompts": ["\xff"]}', b"[" * 5000 + b"]" * 5000, b'{"prompts": 1e999}', b'{"prompts": ["\\ud800"]}']
)
def test_bodies_that_are_no_json_are_422(raw):
    _, client = served()
    with client:
        reply = client.post("/generate/", content=raw, headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["code"]) == (422, "body-invalid")


def test_a_video_placeholder_reaches_no_engine():
    parts, client = served()
    (video,) = parts.prompts._unservable
    with client:
        assert call(client, "/generate/", {"prompts": [[5, video]]})[:2] == (400, "token-id-invalid")
