"""Images that the requests of a native call share: sent once, decoded once."""

import base64
import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from conformance.doubles.digits import scenes
from conformance.doubles.stand_in import refusal
from rollmatch.dialects.native.client import encode
from rollmatch.dialects.prompt import Prompt, SamplingRules

IMAGE = 414
FILES = [Path(scene.images[0]).read_bytes() for scene in scenes()[:2]]


def call_of(place):
    """One request whose image is the one at ``place`` of the call's."""
    request = {"request_id": "0", "prompt_token_ids": [5, IMAGE, 6], "images": [place]}
    return {"requests": [request], "sampling": {"max_tokens": 3}, "images": [base64.b64encode(FILES[0]).decode()]}


@pytest.mark.scenario(
    "data-ownership/a-group-shares-its-image",
    clauses=["data-ownership/only-requests-rollouts-and-weights-cross-the-border#4"],
)
def test_a_group_shares_its_image(start):
    group = {"prompt_token_ids": (5, IMAGE, 6), "messages": (), "seed": 1}
    prompts = [Prompt(request_id=f"{i}", images=(bytes(bytearray(FILES[i // 8])),), **group) for i in range(16)]
    rules = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "banned_token_ids": ()}
    body = encode(prompts, SamplingRules(max_tokens=3, stop_token_ids=(), logprobs=False, **rules))
    assert body["images"] == FILES
    parts, _, client = start(max_model_len=512)
    kind = {"content-type": "application/msgpack"}
    reply = client.post("/native/infer/", content=msgspec.msgpack.encode(body), headers=kind)
    assert reply.status_code == 200, reply.content
    drawn = [draw.prompt.images[0] for replica in parts.pool.replicas for draw in replica.generated]
    assert len(drawn) == 16
    decoded = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in FILES]
    assert len({id(image) for image in drawn}) == 2
    for pixels in decoded:
        assert sum(np.array_equal(np.asarray(image), pixels) for image in drawn) == 8


@pytest.mark.parametrize(("place", "status", "code"), [(1, 400, "images-misfit"), (-1, 422, "body-invalid")])
def test_a_place_that_the_call_lacks_is_refused(start, place, status, code):
    parts, post, _ = start(max_model_len=512)
    assert refusal(post("/native/infer/", call_of(place)), "code") == (status, code)
    assert not any(replica.generated for replica in parts.pool.replicas)
    assert post("/native/infer/", call_of(0))[0] == 200
