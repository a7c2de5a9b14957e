"""Log-probabilities of sampled tokens: asked for in each dialect's own words, one per token or refused."""

import dataclasses
import json
import math
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import responses

from conformance.doubles.learner_side import URL, server_of
from conformance.doubles.refusals import refused
from conformance.doubles.swift_double import RULES, prompts
from rollmatch.data.ids import pack_ids
from rollmatch.dialects.logprobs import check_logprobs
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.members import ServerMembers
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.run.connect import try_out

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
    reported = None if values is None else [[[value] for value in values]]
    return {"json": {"prompt_ids": [[1]], "completion_ids": [IDS], "logprobs": reported}}


def stock(values):
    """The first of two choices counts."""
    choice = {"token_ids": IDS, "finish_reason": "stop", "prompt_token_ids": [1], "logprobs": labels(values)}
    return {"json": {"choices": [choice, choice | {"token_ids": [*IDS, 1], "logprobs": None}]}}


def labels(values):
    """Log-probabilities as completions of ids have them."""
    return None if values is None else {"token_logprobs": values}


ANSWERS = {
    "native": ("/native/infer/", native),
    "swift": ("/infer/", swift),
    "trl": ("/generate/", trl),
    "vllm": ("/v1/completions/", stock),
}


def sent_by(call):
    body = call.calls[0].request.body
    try:
        return json.loads(body)
    except ValueError:
        return msgspec.msgpack.decode(body)


def logprobs_in(sent):
    """What a request says of log-probabilities, wherever its dialect says it."""
    for part in ("sampling", "request_config"):
        sent = sent.get(part, sent)
    return sent.get("logprobs")


@pytest.mark.parametrize("rules", [ASKING, RULES])
@pytest.mark.parametrize("dialect", ANSWERS)
@responses.activate
def test_they_are_requested_only_where_configured_and_come_back_one_per_token(dialect, rules):
    route, answer = ANSWERS[dialect]
    call = responses.post(f"{URL}{route}", **answer(LOGPROBS if rules.logprobs else None))
    (reply,) = server_of(dialect).infer(prompts(1), rules)
    asked, expected = (
        (0 if dialect in ("trl", "vllm") else True, pytest.approx(LOGPROBS)) if rules.logprobs else (None, None)
    )
    assert (logprobs_in(sent_by(call)), reply.logprobs) == (asked, expected)


@pytest.mark.parametrize(
    ("dialect", "values"), [*((each, LOGPROBS[:1]) for each in ANSWERS), ("native", [-0.1, math.nan])]
)
@responses.activate
def test_one_too_few_is_refused(dialect, values):
    route, answer = ANSWERS[dialect]
    responses.post(f"{URL}{route}", **answer(values))
    with refused("reply-malformed", URL):
        server_of(dialect).infer(prompts(1), ASKING)


@pytest.mark.parametrize("values", [7, "ab", [-0.1, 10**400], [-0.1, math.nan], [-0.1, [[]]], [-0.1, {"logprob": {}}]])
@pytest.mark.parametrize("dialect", ["swift", "trl", "vllm"])
@responses.activate
def test_what_is_no_number_is_refused(dialect, values):
    choice = {"token_ids": IDS, "finish_reason": "stop", "prompt_token_ids": [1]}
    bodies = {
        "swift": [{"choices": [choice | {"logprobs": {"content": values}}], "prompt_token_ids": [1]}],
        "trl": {"prompt_ids": [[1]], "completion_ids": [IDS], "logprobs": [values]},
        "vllm": {"choices": [choice | {"logprobs": labels(values)}]},
    }
    responses.post(f"{URL}{ANSWERS[dialect][0]}", body=json.dumps(bodies[dialect]))
    with refused("reply-malformed", URL):
        server_of(dialect).infer(prompts(1), ASKING)


@responses.activate
def test_older_trl_servers_tell_a_number_per_token():
    responses.post(f"{URL}/generate/", json={"prompt_ids": [[1]], "completion_ids": [IDS], "logprobs": [LOGPROBS]})
    (reply,) = server_of("trl").infer(prompts(1), ASKING)
    assert reply.logprobs == pytest.approx(LOGPROBS)


def one_token(token_id, value):
    reported = None if value is None else labels([value])
    choice = {"token_ids": [token_id], "finish_reason": "length", "prompt_token_ids": [1], "logprobs": reported}
    return {"choices": [choice]}


def tried(*values):
    """What a stock server was asked by a check that it answers with these, token by token."""
    with responses.RequestsMock() as mock:
        for place, value in enumerate(values):
            mock.post(f"{URL}/v1/completions/", json=one_token(4 + place, value))
        check_logprobs(server_of("vllm"), prompt_token_ids=(1,))
        return [json.loads(call.request.body) for call in mock.calls]


def test_a_server_that_shapes_before_it_reports_is_certain_of_the_only_token_left():
    first, second = tried(0.0, -1e-6)
    assert (first["top_k"], first["max_tokens"], first["logprobs"]) == (1, 1, 0)
    assert (first["temperature"], first["top_p"], first["repetition_penalty"]) == (1.0, 1.0, 1.0)
    assert (first["logit_bias"], second["logit_bias"]) == ({}, {"4": -100.0})


@pytest.mark.parametrize(
    ("values", "reported"),
    [((-0.7,), "-0.7"), ((-1e-5, -9.0), "-9"), ((12.5,), "12.5"), ((None,), "none at all")],
    ids=["unsure", "sure of the first", "logits", "silent"],
)
def test_a_server_that_reports_something_else_is_refused(values, reported):
    mode = "--logprobs-mode processed_logprobs"
    with refused("logprobs-of-another-distribution", URL, problem=reported, remedy=mode):
        tried(*values)


def num_tried(*, rank=0, **decoding):
    """Calls by which a server is tried out before a training that decodes so."""
    vocabulary = SimpleNamespace(encode=lambda text: (1,))
    backend = object.__new__(VllmServerBackend)
    backend.members, backend.template = ServerMembers([server_of("vllm")]), SimpleNamespace(vocabulary=vocabulary)
    backend.ranks = Ranks(rank=rank, learner_world_size=2)
    with responses.RequestsMock(assert_all_requests_are_fired=False) as mock:
        for place in range(2):
            mock.post(f"{URL}/v1/completions/", json=one_token(4 + place, 0.0))
        try_out(backend, Decoding(max_new_tokens=8, **decoding))
        return len(mock.calls)


def test_servers_are_tried_out_where_the_two_distributions_differ():
    shaped = ({"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5})
    assert [num_tried(logprobs=True, **reported) for reported in shaped] == [2, 2, 2]
    assert num_tried(logprobs=True, temperature=1.0) == 0
    assert num_tried(logprobs=False, temperature=0.7) == 0
    assert num_tried(logprobs=True, temperature=0.7, rank=1) == 0
