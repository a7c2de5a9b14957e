"""Log-probabilities of sampled tokens: asked for in each dialect's own words, one per token or refused."""

import dataclasses
import json

import msgspec
import numpy as np
import pytest
import responses

from conformance.wire.swift_double import RULES, error_of, prompts
from rollmatch.wire.client.session import DIALECTS, ClientSettings, RolloutServer
from rollmatch.wire.ids import pack_ids

URL = "http://h:1"
ASKING = dataclasses.replace(RULES, logprobs=True)
IDS, LOGPROBS = [4, 9], [-0.5, -0.25]


def content(values):
    return {"content": [{"token": "a", "logprob": value} for value in values]}


def native(values):
    packed = None if values is None else np.asarray(values, dtype="<f4").tobytes()
    entry = {"request_id": "0.0.0", "prompt_token_ids": pack_ids([1]), "response_token_ids": pack_ids(IDS)}
    entry |= {"finish_reason": "stop", "policy_version": 3, "logprobs": packed}
    return {"body": msgspec.msgpack.encode({"responses": [entry]}), "content_type": "application/msgpack"}


def swift(values):
    choice = {"token_ids": IDS, "finish_reason": "stop", "logprobs": None if values is None else content(values)}
    return {"json": [{"prompt_token_ids": [1], "choices": [choice]}]}


def trl(values):
    told = None if values is None else [[[value] for value in values]]
    return {"json": {"prompt_ids": [[1]], "completion_ids": [IDS], "logprobs": told}}


def stock(values):
    choice = {"token_ids": IDS, "finish_reason": "stop", "logprobs": None if values is None else content(values)}
    return {"json": {"prompt_token_ids": [1], "choices": [choice]}}


ANSWERS = {
    "native": ("/native/infer/", native),
    "swift": ("/infer/", swift),
    "trl": ("/generate/", trl),
    "vllm": ("/v1/chat/completions/", stock),
}


def server_of(dialect):
    server = RolloutServer(URL, ClientSettings(infer_timeout_s=5.0))
    server.dialect = DIALECTS[dialect](URL)
    return server


def sent_by(call):
    body = call.calls[0].request.body
    try:
        return json.loads(body)
    except ValueError:
        return msgspec.msgpack.decode(body)


def told_in(sent):
    """What a request says of log-probabilities, wherever its dialect says it."""
    for part in ("sampling", "request_config"):
        sent = sent.get(part, sent)
    return sent.get("logprobs")


@pytest.mark.parametrize("dialect", ANSWERS)
@responses.activate
def test_they_come_back_one_per_token(dialect):
    route, answer = ANSWERS[dialect]
    call = responses.post(f"{URL}{route}", **answer(LOGPROBS))
    (reply,) = server_of(dialect).infer(prompts(1), ASKING)
    assert reply.logprobs == pytest.approx(LOGPROBS)
    assert told_in(sent_by(call)) == (0 if dialect == "trl" else True)
    assert told_in(sent_by(call)) is not None


@pytest.mark.parametrize("dialect", ANSWERS)
@responses.activate
def test_nobody_asks_for_them_unasked(dialect):
    route, answer = ANSWERS[dialect]
    call = responses.post(f"{URL}{route}", **answer(None))
    (reply,) = server_of(dialect).infer(prompts(1), RULES)
    assert reply.logprobs is None
    assert told_in(sent_by(call)) is None


@pytest.mark.parametrize("dialect", ANSWERS)
@responses.activate
def test_one_too_few_is_refused(dialect):
    route, answer = ANSWERS[dialect]
    responses.post(f"{URL}{route}", **answer(LOGPROBS[:1]))
    error = error_of(lambda: server_of(dialect).infer(prompts(1), ASKING))
    assert (error.code, error.key) == ("reply-malformed", URL)


@responses.activate
def test_older_trl_servers_tell_a_number_per_token():
    responses.post(f"{URL}/generate/", json={"prompt_ids": [[1]], "completion_ids": [IDS], "logprobs": [LOGPROBS]})
    (reply,) = server_of("trl").infer(prompts(1), ASKING)
    assert reply.logprobs == pytest.approx(LOGPROBS)
