"""What one caller may cost: refused with 4xx before anything is decoded, tokenised or generated."""

import asyncio
import gc
import os
import time
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from conformance.doubles.refusals import refused
from conformance.doubles.request_bodies import IMAGE, call, native, picture
from conformance.judge.servers.bounded import in_thread
from rollmatch.config.limits import LimitsConfig
from rollmatch.server.http import BoundedBody, BufferedBytes
from rollmatch.server.images import ImageReader


def ids_of(count, *, length=1):
    return [[5] * length] * count


def user(*content):
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


SHOWN = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(32, 32)}"}}


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
        (
            {"max_images_per_call": 1},
            "/infer/",
            {"infer_requests": [{"messages": [user(SHOWN, SHOWN)]}]},
            {"infer_requests": [{"messages": [user(SHOWN)]}]},
        ),
        (
            {"max_images_per_call": 1},
            "/chat/",
            {"messages": [[user(SHOWN)]] * 2},
            {"messages": [[user(SHOWN)]]},
        ),
        ({"max_prompts_per_call": 1}, "/chat/", {"messages": [[user("a")]] * 2}, {"messages": [[user("a")]]}),
    ],
)
def test_a_call_above_a_limit_is_refused_and_one_at_it_served(served, limits, route, over, within):
    parts, client = served(**limits)
    assert call(client, route, over)[:2] == (422, "call-too-large")
    assert not any(replica.generated for replica in parts.pool.replicas)
    assert call(client, route, within)[0] == 200


@pytest.mark.parametrize("count", [10**6, 2**48])
@pytest.mark.parametrize(
    ("route", "body_with"),
    [
        ("/generate/", lambda n: {"prompts": [[5]], "n": n}),
        ("/chat/", lambda n: {"messages": [[user("a")]], "n": n}),
        ("/infer/", lambda n: {"infer_requests": [{"prompt_token_ids": [5]}], "request_config": {"n": n}}),
        ("/inference/v1/generate/", lambda n: {"token_ids": [5], "sampling_params": {"n": n}}),
    ],
)
def test_too_many_responses_are_refused_before_anything_is_made_for_each(served, monkeypatch, route, body_with, count):
    """No machine has the memory for 2**48 of anything."""
    parts, client = served()
    monkeypatch.setattr(parts.prompts, "make", None)
    assert call(client, route, body_with(count)) == (422, "call-too-large", "n")


@pytest.mark.parametrize("route", ["/generate/", "/infer/"])
def test_long_text_is_not_tokenised(served, monkeypatch, route):
    parts, client = served(max_text_bytes=2000)
    text = "\u00e9" * 1001
    body = {"prompts": [text]} if route == "/generate/" else {"infer_requests": [{"messages": [user(text)]}]}
    monkeypatch.setattr(parts.prompts, "tokenizer", Untouched(parts.prompts.tokenizer))
    assert call(client, route, body)[:2] == (400, "prompt-too-long")


class Untouched:
    """A tokenizer that renders, but must not encode."""

    def __init__(self, tokenizer):
        self.apply_chat_template = tokenizer.apply_chat_template
        self.added_tokens_decoder = tokenizer.added_tokens_decoder


def test_pixels_are_counted_before_they_are_decoded(served, monkeypatch):
    _, client = served(max_pixels_per_image=4096, max_pixels_per_call=6000)
    two = native([[IMAGE, 5]] * 2, images=[picture(64, 64)])
    assert call(client, "/native/infer/", two) == (413, "image-too-large", "requests[1].images[0]")
    monkeypatch.setattr(Image.Image, "convert", None)
    one = native([[IMAGE, 5]], images=[picture(65, 64)])
    assert call(client, "/native/infer/", one) == (413, "image-too-large", "requests[0].images[0]")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "ICO"])
def test_only_listed_formats_are_decoded(served, kind):
    _, client = served()
    image = f"data:image/x;base64,{picture(32, 32, kind)}"
    expected = (400, "image-unreadable") if kind in ("TIFF", "PPM", "ICO") else (200, None)
    assert call(client, "/native/infer/", native([[IMAGE, 5]], images=[image]))[:2] == expected


def test_a_pipe_below_a_root_is_no_image(start, tmp_path):
    os.mkfifo(tmp_path / "a.png")
    _, _, client = start(max_model_len=512, image_roots=(str(tmp_path),))
    returned = call(client, "/native/infer/", native([[IMAGE, 5]], images=[str(tmp_path / "a.png")]))
    assert returned[:2] == (400, "image-unreadable")


def test_large_bodies_are_refused_announced_or_not(served):
    _, client = served(max_body_bytes=1000)

    def chunks():
        for _ in range(3):
            yield b" " * 500

    reply = client.post("/native/infer/", json={"x": "y" * 1000})
    assert (reply.status_code, reply.json()["code"], reply.headers["connection"]) == (413, "body-too-large", "close")
    reply = client.post("/native/infer/", content=chunks(), headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["code"]) == (413, "body-too-large")
    assert client.post("/generate/", json={"prompts": [[5]]}).status_code == 200


def test_a_full_queue_is_429(served):
    parts, client = served(max_waiting_responses=3)
    parts.pool._loads[0] = 2
    assert call(client, "/generate/", {"prompts": [[5]], "n": 2})[:2] == (429, "server-busy")
    assert client.post("/generate/", json={"prompts": [[5]]}).status_code == 200


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 100))
def test_a_body_may_fill_what_those_of_other_calls_leave_in_however_many_parts(lengths, others):
    buffered, limits = BufferedBytes(held=others), LimitsConfig(max_buffered_bytes=100)
    parts = iter(lengths)

    async def receive():
        return {"type": "http.request", "body": bytes(next(parts)), "more_body": True}

    async def receive_all():
        for _ in lengths:
            await body.receive()

    body = BoundedBody(receive, limits, buffered)
    with refused("server-busy", "body") if others + sum(lengths) > 100 else nullcontext():
        asyncio.run(receive_all())
    body.release()
    assert buffered.held == others


@pytest.mark.parametrize(("body", "status"), [(b'{"prompts": [[5]]}', 200), (b'{"prompts": [[5]', 422)])
def test_a_body_that_is_decoded_beside_the_loop_is_read_as_others_are(served, body, status):
    headers = {"content-type": "application/json"}
    assert served()[1].post("/generate/", content=body + b" " * 100_000, headers=headers).status_code == status


@pytest.mark.parametrize(("spare", "returned"), [(0, (200, None)), (-1, (422, "call-too-large"))])
def test_tokens_of_texts_are_counted_when_they_are_made(served, spare, returned):
    parts, client = served()
    num_tokens = len(parts.prompts.tokenizer.encode("List every digit."))
    parts, client = served(max_tokens_per_call=2 * num_tokens + spare)
    assert call(client, "/generate/", {"prompts": ["List every digit."] * 2, "max_tokens": 2})[:2] == returned


def test_our_own_protocol_never_shortens_a_response(start):
    _, _, client = start(max_model_len=64)
    for max_tokens, returned in ((4, (200, None)), (5, (400, "prompt-too-long"))):
        body = native([[5] * 60]) | {"sampling": {"max_tokens": max_tokens}}
        assert call(client, "/native/infer/", body)[:2] == returned


def test_an_image_in_a_circle_of_references_makes_room():
    """An error holds the frames that it passed, and a server collects seldom: calls with images were 429 for ever."""
    reader = ImageReader((), LimitsConfig(max_decoded_pixels=6000))
    gc.disable()
    try:
        circle = [reader.read(picture(64, 64), reader.budget(), item=0, key="image")]
        circle.append(circle)
        del circle
        assert reader.read(picture(64, 64), reader.budget(), item=0, key="image").size == (64, 64)
    finally:
        gc.enable()


def test_pixels_are_counted_over_all_calls_while_their_images_are_in_memory():
    reader = ImageReader((), LimitsConfig(max_decoded_pixels=6000))
    first = reader.read(picture(64, 64), reader.budget(), item=0, key="image")
    with refused("server-busy", "image"):
        reader.read(picture(64, 63), reader.budget(), item=0, key="image")
    assert first.size == (64, 64)
    del first
    assert reader.read(picture(64, 63), reader.budget(), item=0, key="image").size == (64, 63)


def test_a_call_with_an_image_waits_for_the_memory_of_another(served):
    parts, client = served(max_decoded_pixels=6000)
    body = native([[IMAGE, 5]], images=[picture(64, 64)])
    assert call(client, "/native/infer/", body)[0] == 200
    assert call(client, "/native/infer/", body)[:2] == (429, "server-busy")
    for replica in parts.pool.replicas:
        replica.generated.clear()  # what these engines remember, others have done with
    assert call(client, "/native/infer/", body)[0] == 200


@pytest.mark.parametrize(("spare", "returned"), [(0, (200, None)), (-1, (422, "call-too-large"))])
def test_likeliest_tokens_are_counted(served, spare, returned):
    _, client = served(max_logprobs_per_call=8 * 30 * 5 + spare)
    body = {"prompts": [[5]], "n": 8, "max_tokens": 30, "logprobs": 5}
    assert call(client, "/generate/", body)[:2] == returned
    assert call(client, "/generate/", body | {"logprobs": 0})[0] == 200


@pytest.mark.scenario(clauses=["rollout-server/a-bad-request-costs-nobody-else-anything#9"])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate/", {"prompts": [[5], [6]], "max_tokens": 30, "logprobs": 5}),
        ("/inference/v1/generate/", {"token_ids": [5], "sampling_params": {"n": 2, "max_tokens": 30, "logprobs": 5}}),
    ],
)
def test_likeliest_tokens_are_counted_over_all_calls_that_are_being_answered(start, route, body):
    limits = LimitsConfig(max_logprobs_per_call=300, max_waiting_logprobs=599)
    _, _, client = start(max_model_len=512, limits=limits, delay_s=1.0)
    first = in_thread(call, client, route, body)
    while not client.get("/health/").json()["running"]:
        time.sleep(0.01)
    assert call(client, route, body)[:2] == (429, "server-busy")
    assert first.result()[0] == 200
    assert call(client, route, body)[0] == 200


def test_links_in_a_circle_are_no_image(start, tmp_path):
    (tmp_path / "a.png").symlink_to(tmp_path / "b.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    _, _, client = start(max_model_len=512, image_roots=(str(tmp_path),))
    returned = call(client, "/native/infer/", native([[IMAGE, 5]], images=[str(tmp_path / "a.png")]))
    assert returned[:2] == (400, "image-unreadable")
