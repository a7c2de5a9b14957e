"""A native reply beside the same ids as the pydantic JSON that swift trainers exchange, encoded and decoded."""

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel

from rollmatch.data.ids import pack_ids, unpack_ids
from rollmatch.server.payloads import InferReply, InferResponse

NUM_RESPONSES, PROMPT_LEN, RESPONSE_LEN = 512, 1500, 1000
VOCABULARY_SIZE = 151_936


class Message(BaseModel):
    role: str = "assistant"
    content: str = ""


class Choice(BaseModel):
    index: int = 0
    message: Message = Message()
    finish_reason: str = "stop"
    token_ids: list[int]


class ChatResponse(BaseModel):
    choices: list[Choice]
    prompt_token_ids: list[int]
    id: str


class RolloutOutput(BaseModel):
    response: ChatResponse


class SwiftReply(BaseModel):
    """ms-swift answers with a bare list, which pydantic handles at the same cost."""

    outputs: list[RolloutOutput]


@pytest.fixture(scope="module")
def ids():
    """[512] (prompt, response), each an int32 array."""
    drawn = np.random.default_rng(0)
    return [
        tuple(drawn.integers(0, VOCABULARY_SIZE, length, dtype=np.int32) for length in (PROMPT_LEN, RESPONSE_LEN))
        for _ in range(NUM_RESPONSES)
    ]


@pytest.fixture(scope="module")
def listed(ids):
    """The same ids as lists, which is how an engine returns them."""
    return [(prompt.tolist(), response.tolist()) for prompt, response in ids]


def cross_natively(ids):
    """Rows of ids over the wire and back, in whatever form they come; [n] (prompt, response) as arrays."""
    responses = [
        InferResponse(
            request_id=str(place),
            prompt_token_ids=pack_ids(prompt),
            response_token_ids=pack_ids(response),
            finish_reason="stop",
            policy_version=1,
        )
        for place, (prompt, response) in enumerate(ids)
    ]
    reply = InferReply(instance="0", policy_version=1, responses=tuple(responses))
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(reply.model_dump()))
    return [(unpack_ids(one["prompt_token_ids"]), unpack_ids(one["response_token_ids"])) for one in body["responses"]]


def cross_as_swift(listed):
    outputs = [
        RolloutOutput(
            response=ChatResponse(choices=[Choice(token_ids=response)], prompt_token_ids=prompt, id=str(place))
        )
        for place, (prompt, response) in enumerate(listed)
    ]
    raw = SwiftReply(outputs=outputs).model_dump_json()
    answers = [one.response for one in SwiftReply.model_validate_json(raw).outputs]
    return [(one.prompt_token_ids, one.choices[0].token_ids) for one in answers]


def as_tuples(rows):
    """What the learner continues with."""
    return [(tuple(prompt.tolist()), tuple(response.tolist())) for prompt, response in rows]


def test_native_payload_beside_pydantic_json(side_by_side, ids, listed):
    """Each side begins and ends with the form in which it holds ids: arrays here, lists there."""
    assert as_tuples(cross_natively(ids)) == [tuple(map(tuple, pair)) for pair in cross_as_swift(listed)]
    side_by_side(lambda: cross_natively(ids), lambda: cross_as_swift(listed), bar=20, rounds=21)


def test_native_payload_from_lists_to_tuples_beside_pydantic_json(side_by_side, listed):
    """With the turns from an engine's lists into bytes, and from bytes into the learner's tuples."""
    side_by_side(lambda: as_tuples(cross_natively(listed)), lambda: cross_as_swift(listed), bar=None, rounds=5)
