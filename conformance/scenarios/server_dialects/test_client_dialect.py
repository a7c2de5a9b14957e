"""The dialect is found by the routes; each one asks in its own words and reads its own answers."""

import json
import re
from dataclasses import replace

import msgspec
import pytest
import responses

from conformance.doubles.learner_side import TEMPLATE, URL, server_of
from conformance.doubles.records import make_request
from conformance.doubles.refusals import refused
from conformance.doubles.swift_double import RULES, prompts
from rollmatch.data.ids import pack_ids
from rollmatch.dialects.dialect import find_routes, name_dialect
from rollmatch.dialects.http import HttpServer
from rollmatch.dialects.prompt import Prompt
from rollmatch.dialects.session import SIGNS, ClientSettings, RolloutServer
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.server.payloads import InferBatch

F1 = ("/health/", "/get_world_size/", "/init_communicator/")
ROUTES = {
    "native": ("/health/", "/native/infer/", "/native/sync/", "/native/communicator/", "/infer/", *F1),
    "swift": (*F1, "/infer/", "/update_flattened_params/"),
    "trl": (*F1, "/generate/", "/update_named_param/"),
    "vllm": ("/health", "/v1/chat/completions", "/init_weight_transfer_engine", "/update_weights"),
}
CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "image", "image": "/a.png"}, {"type": "text", "text": "Look."}]},
)
UNSHAPED = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""What servers would else take from the model's generation_config.json."""
PICTURED = Prompt(request_id="0.0.0", prompt_token_ids=(1, 2), messages=CHAT, images=(b"png",), seed=5)


@pytest.mark.scenario(
    "server-dialects/infer-means-the-swift-dialect",
    "server-dialects/generate-means-the-trl-dialect",
    clauses=["server-dialects/the-client-finds-the-dialect-by-the-routes#1"],
)
@pytest.mark.parametrize("dialect", ROUTES)
@responses.activate
def test_routes_name_the_dialect(dialect):
    responses.get(f"{URL}/openapi.json", json={"paths": {route: {} for route in ROUTES[dialect]}})
    routes = find_routes(HttpServer(URL), SIGNS.values(), timeout_s=1)
    assert name_dialect(HttpServer(URL), routes, SIGNS) == dialect
    assert set(routes.values()) == set(ROUTES[dialect])
    responses.get(re.compile(f"{URL}/health/?"), json={"status": "ok"})
    server = RolloutServer(URL, ClientSettings(timeout_s=1))
    server.connect()
    assert server.dialect.name == dialect
    is_silent_when_busy = server.watch.silence_s is None
    assert is_silent_when_busy == (dialect in ("swift", "trl")), "no answer to health while ms-swift or TRL generates"


@pytest.mark.parametrize("dialect", ["swift", "trl", "vllm"])
@responses.activate
def test_a_server_that_lists_no_routes_is_probed_for_each(dialect):
    for route in ROUTES[dialect]:
        responses.get(URL + route, status=200 if "health" in route else 405)
    responses.get(f"{URL}/openapi.json", status=404)
    responses.get(re.compile(".*"), status=404)
    routes = find_routes(HttpServer(URL), SIGNS.values(), timeout_s=1)
    assert name_dialect(HttpServer(URL), routes, SIGNS) == dialect
    assert set(routes.values()) <= set(ROUTES[dialect])


@pytest.mark.scenario(
    "server-dialects/a-server-of-another-kind-is-refused",
    clauses=["server-dialects/the-client-finds-the-dialect-by-the-routes#2"],
)
@responses.activate
def test_a_server_of_another_kind_is_refused():
    responses.get(f"{URL}/health/", json={"status": "ok"})
    responses.get(f"{URL}/openapi.json", json={"paths": {"/health/": {}, "/v1/models": {}}})
    with refused("dialect-unknown", URL):
        RolloutServer(URL, ClientSettings(timeout_s=1)).connect()


@pytest.mark.scenario(clauses=["server-dialects/the-client-finds-the-dialect-by-the-routes#3"])
@responses.activate
def test_routes_are_written_as_the_server_writes_them():
    responses.get(f"{URL}/health/", json={"status": "ok"})
    responses.get(f"{URL}/openapi.json", json={"paths": {route: {} for route in ROUTES["vllm"]}})
    server = RolloutServer(URL, ClientSettings(timeout_s=1))
    server.connect()
    assert [server.path_of(route) for route in ("/health", "/update_weights")] == ["/health", "/update_weights"]


def native_answer(entries):
    return {"body": msgspec.msgpack.encode({"responses": entries}), "content_type": "application/msgpack"}


def native_entry(i, **changed):
    ids = {"prompt_token_ids": pack_ids([1, i]), "response_token_ids": pack_ids([i, 9])}
    return {"request_id": f"0.0.{i}", **ids, "finish_reason": "stop", "policy_version": 3} | changed


@pytest.mark.scenario(clauses=["server-dialects/the-native-dialect-carries-a-sync-in-one-message#3"])
@responses.activate
def test_native_speaks_ids_as_the_payloads_say():
    call = responses.post(f"{URL}/native/infer/", **native_answer([native_entry(0), native_entry(1)]))
    replies = server_of("native").infer(prompts(2), RULES)
    assert [(r.prompt_token_ids, r.response_token_ids, r.policy_version) for r in replies] == [
        ((1, 0), (0, 9), 3),
        ((1, 1), (1, 9), 3),
    ]
    batch = InferBatch.model_validate(msgspec.msgpack.decode(call.calls[0].request.body))
    assert [request.prompt_token_ids for request in batch.requests] == [pack_ids([1, 0]), pack_ids([1, 1])]
    assert [request.seed for request in batch.requests] == [5, 6]
    assert (batch.sampling.max_tokens, batch.sampling.stop_token_ids) == (8, (9,))
    assert batch.sampling.logit_bias == {7: -100.0}


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        (native_entry(0, request_id="0.0.1"), "reply-malformed"),
        (native_entry(0, response_token_ids=[1]), "reply-malformed"),
        (native_entry(0, prompt_token_ids=b""), "reply-malformed"),
        (native_entry(0, prompt_token_ids=b"abc"), "reply-malformed"),
        (native_entry(0, policy_version=None), "reply-malformed"),
        (native_entry(0, finish_reason="error"), "reply-malformed"),
        (native_entry(0, logprobs=b"abc"), "reply-malformed"),
    ],
)
@responses.activate
def test_a_native_entry_that_is_not_whole_is_refused(entry, code):
    responses.post(f"{URL}/native/infer/", **native_answer([entry]))
    with refused(code):
        server_of("native").infer(prompts(1), RULES)


@responses.activate
def test_swift_puts_pictures_beside_tags():
    entry = {"prompt_token_ids": [1], "choices": [{"token_ids": [], "finish_reason": "length"}]}
    call = responses.post(f"{URL}/infer/", json=[entry], headers={"x-policy-version": "4"})
    (reply,) = server_of("swift").infer([PICTURED], RULES)
    assert (reply.response_token_ids, reply.finish_reason, reply.policy_version) == ((), "length", 4)
    body = json.loads(call.calls[0].request.body)
    assert UNSHAPED.items() <= body["request_config"].items()
    (sent,) = body["infer_requests"]
    assert [message["content"] for message in sent["messages"]] == ["Be brief.", "<image>Look."]
    assert sent["images"] == ["data:image/png;base64,cG5n"]


@responses.activate
def test_trl_sends_ids_and_reads_why_a_response_ended():
    answer = {"prompt_ids": [[1, 0], [1, 1]], "completion_ids": [[4, 9], [4, 4]], "logprobs": None}
    call = responses.post(f"{URL}/generate/", json=answer)
    replies = server_of("trl").infer(prompts(2), RULES)
    assert [(reply.response_token_ids, reply.finish_reason) for reply in replies] == [
        ((4, 9), "stop"),
        ((4, 4), "length"),
    ]
    sent = json.loads(call.calls[0].request.body)
    assert (sent["prompts"], sent["images"], sent["n"]) == ([[1, 0], [1, 1]], [None, None], 1)
    assert sent["generation_kwargs"] == {"seed": 5, "stop_token_ids": [9]}
    assert sent["min_p"] == 0.0


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"completion_ids": [[1]]}, "reply-malformed"),
        ({"prompt_ids": [[1]], "completion_ids": []}, "reply-count-mismatch"),
        ({"prompt_ids": [[]], "completion_ids": [[1]]}, "reply-malformed"),
        ({"prompt_ids": [["1"]], "completion_ids": [[1]]}, "reply-malformed"),
    ],
)
@responses.activate
def test_a_trl_answer_that_is_not_whole_is_refused(answer, code):
    responses.post(f"{URL}/generate/", json=answer)
    with refused(code):
        server_of("trl").infer(prompts(1), RULES)


@pytest.mark.scenario(clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#5,6"])
@responses.activate
def test_a_stock_server_gets_one_call_per_prompt():
    """Its ids; a chat where it has images, which ids cannot carry."""

    def answer(request):
        body = json.loads(request.body)
        assert UNSHAPED.items() <= body.items()
        ids = body.get("prompt", [1, 7])
        choice = {"token_ids": [ids[-1], 9], "finish_reason": "stop"}
        beside, inside = ({"prompt_token_ids": ids}, {}) if "messages" in body else ({}, {"prompt_token_ids": ids})
        return 200, {}, json.dumps(beside | {"choices": [choice | inside]})

    for route in ("chat/completions", "completions"):
        responses.add_callback(responses.POST, f"{URL}/v1/{route}/", callback=answer)
    replies = server_of("vllm").infer([*prompts(3), PICTURED], RULES)
    assert [reply.prompt_token_ids for reply in replies] == [
        *(prompt.prompt_token_ids for prompt in prompts(3)),
        (1, 7),
    ]
    sent = [json.loads(call.request.body) for call in responses.calls]
    assert sorted(body["seed"] for body in sent) == [5, 5, 6, 7]
    (pictured,) = [body for body in sent if "messages" in body]
    assert pictured["messages"][1]["content"][0]["image_url"] == {"url": "data:image/png;base64,cG5n"}
    assert pictured["return_token_ids"] is True


CHOICE = {"token_ids": [4, 4], "finish_reason": "length"}
CUT = {
    "native": (
        "/native/infer/",
        native_answer([native_entry(0, response_token_ids=pack_ids([4, 4]), finish_reason="length")]),
    ),
    "swift": ("/infer/", {"json": [{"prompt_token_ids": [1, 0], "choices": [CHOICE]}]}),
    "trl": ("/generate/", {"json": {"prompt_ids": [[1, 0]], "completion_ids": [[4, 4]]}}),
    "vllm": ("/v1/completions/", {"json": {"choices": [CHOICE | {"prompt_token_ids": [1, 0]}]}}),
}
"""Answers of two ids to a prompt of two, which no stop token ends."""


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#14,15"])
@pytest.mark.parametrize("dialect", CUT)
@pytest.mark.parametrize(
    ("held", "problem", "remedy"),
    [
        (None, "does not state how many it holds", "If it holds 4 tokens: Serve with a max_model_len of at least 6"),
        (64, "4 of 64 tokens", "set max_new_tokens of this run to 2"),
        (4, "the server holds 4", "Serve with a max_model_len of at least 6"),
    ],
)
@responses.activate
def test_a_response_that_a_limit_of_the_server_has_cut_is_refused(dialect, held, problem, remedy):
    route, answer = CUT[dialect]
    responses.post(URL + route, **answer)
    responses.get(f"{URL}/health/", json={"status": "ok", "policy_version": 3})
    responses.get(f"{URL}/v1/models", json={"data": [{"id": "m", "max_model_len": held}]})
    server, request = server_of(dialect), make_request(prompt_token_ids=(1, 0))
    server.routes = {} if held is None else {"/v1/models": "/v1/models"}
    backend = VllmServerBackend([server], TEMPLATE, Ranks(), sender=None)
    backend.members.instances = {}
    for limits in ({}, {"max_new_tokens": 4}):
        with refused("response-cut-short", URL, problem=problem, remedy=remedy):
            backend.generate([replace(request, **limits)], Decoding(max_new_tokens=4 if not limits else 8))
    (rollout,) = backend.generate([request], Decoding(max_new_tokens=2))
    assert (rollout.num_tokens, rollout.finish_reason) == (2, "length")
