"""The OpenAI routes on a real engine with two replicas, by the official client."""

import json
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from conformance.rollout.digits import MODEL, load_digits, template_of
from conformance.server.calls import data_url
from conformance.server.test_engine_sync import sync
from rollmatch.data.ids import unpack_ids

pytestmark = pytest.mark.engine
HELLO = [{"role": "user", "content": "Count."}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
LONG = {"max_tokens": 400, "temperature": 0.0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


@pytest.fixture
def client(instance):
    return openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def base(server, learner, policies):
    """The model directory's weights, whatever was synced before."""
    if server.version:
        sync(learner, policies[0], sync_id="base")
    return policies[0]


def ask(client, messages=HELLO, **fields):
    return client.chat.completions.create(model=str(MODEL), messages=messages, **fields)


def complete(client, prompt, **fields):
    return client.completions.create(model=str(MODEL), prompt=prompt, **fields)


def native(server, prompts, seeds=None, **sampling):
    """Prompt ids, response ids and log-probabilities of the native route."""
    batch = [
        {"request_id": str(i), "prompt_token_ids": list(ids), "seed": seeds[i] if seeds else None}
        for i, ids in enumerate(prompts)
    ]
    status, body = server.post("/native/infer/", {"requests": batch, "sampling": {"logprobs": True} | sampling})
    assert status == 200, body
    return [(one["prompt_token_ids"], one["response_token_ids"], one["logprobs"]) for one in body["responses"]]


@pytest.mark.scenario(
    "server-dialects/a-chat-with-an-image-is-the-learner-s-prompt",
    clauses=["server-dialects/the-openai-dialect-serves-openai-clients#1"],
)
def test_a_chat_with_an_image_has_the_ids_and_logprobs_of_the_native_route(
    client, server, base, scene_requests, scene_batch, greedy
):
    prompts, path = load_digits().custom.prompts, Path(scene_requests[0].sample.images[0])
    image = {"type": "image_url", "image_url": {"url": data_url(path)}}
    messages = [
        {"role": "system", "content": prompts.system},
        {"role": "user", "content": [image, {"type": "text", "text": prompts.user}]},
    ]
    biases = {str(token_id): value for token_id, value in greedy["logit_bias"].items()}
    stops = {"stop_token_ids": greedy["stop_token_ids"], "return_token_ids": True}
    reply = ask(
        client, messages, max_tokens=greedy["max_tokens"], temperature=0, logit_bias=biases, logprobs=True,
        extra_body=stops,
    )  # fmt: skip
    sampling = greedy | {"logprobs": True}
    _, body = server.post_packed("/native/infer/", {"requests": scene_batch[:1], "sampling": sampling})
    (expected,) = body["responses"]
    (choice,) = reply.choices
    assert reply.prompt_token_ids == unpack_ids(expected["prompt_token_ids"]).tolist()
    assert choice.token_ids == unpack_ids(expected["response_token_ids"]).tolist()
    stop = template_of().vocabulary.stop_id
    assert tuple(i for i in choice.token_ids if i != stop) == base.responses[0]
    values = memoryview(expected["logprobs"]).cast("f").tolist()
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(values, abs=1e-5)
    assert choice.message.content.startswith('{"objects"')
    assert choice.finish_reason == "stop"


@pytest.mark.scenario(
    "server-dialects/a-seed-counts-up-over-the-choices",
    clauses=["server-dialects/the-openai-dialect-serves-openai-clients#2"],
)
def test_choices_of_several_prompts_repeat_by_their_seed(client, server, base):
    prompts, sampling = [[5, 6], [7, 8, 9]], {"max_tokens": 8, "temperature": 1.0, "seed": 3}
    raw = client.completions.with_raw_response.create(
        model=str(MODEL), prompt=prompts, n=2, logprobs=0, extra_body={"return_token_ids": True}, **sampling
    )
    reply = raw.parse()
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert {choice.policy_version for choice in reply.choices} == {reply.policy_version} == {server.version}
    assert raw.headers["x-policy-version"] == str(server.version)
    doubled = [ids for ids in prompts for _ in range(2)]
    expected = native(server, doubled, seeds=[3, 4, 3, 4], max_tokens=8, temperature=1.0)
    for choice, (prompt_ids, ids, logprobs) in zip(reply.choices, expected, strict=True):
        assert (choice.prompt_token_ids, choice.token_ids) == (prompt_ids, ids)
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-5)
    assert len({tuple(choice.token_ids) for choice in reply.choices}) > 2


@pytest.mark.scenario(clauses=["server-dialects/the-openai-dialect-serves-openai-clients#3,4"])
def test_a_stream_is_the_whole_answer_in_parts_of_one_version(client, server, base):
    fields = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "n": 2, "extra_body": {"return_token_ids": True}}
    whole = ask(client, **fields)
    stream = ask(client, stream=True, stream_options={"include_usage": True}, **fields)
    assert stream.response.headers["x-policy-version"] == str(server.version)
    chunks = list(stream)
    assert {chunk.policy_version for chunk in chunks} == {server.version}
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert [i for part in mine for i in getattr(part, "token_ids", None) or []] == choice.token_ids
    assert len(chunks) > 6


def test_responses_are_of_the_structure_that_is_requested(client, base):
    chosen = ask(client, max_tokens=40, extra_body={"structured_outputs": {"regex": "[ab]{3}"}})
    assert set(chosen.choices[0].message.content) <= set("ab")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    blanks = {str(i): -100.0 for i in range(len(tokenizer)) if tokenizer.decode([i]).isspace()}  # JSON may have many
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    written = ask(client, max_tokens=60, logit_bias=blanks, response_format=wanted).choices[0].message.content
    assert isinstance(json.loads(written)["a"], bool)
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    choice = {"type": "function", "function": {"name": "look"}}
    asked = {"tools": [tool], "tool_choice": choice, "logit_bias": blanks, "max_tokens": 60}
    message = ask(client, **asked).choices[0].message
    called = [call.function.name for call in message.tool_calls or ()]  # none where its arguments did not end in time
    assert called == ["look"] or '{"name": "look", "arguments": ' in message.content
