"""The OpenAI routes on a real engine with two replicas, by the official client."""

import json
from pathlib import Path

import openai
import pytest
import requests
from transformers import AutoTokenizer

from conformance.doubles.digits import MODEL, load_digits, template_of
from conformance.doubles.learner_side import sync
from conformance.judge.calls import data_url
from rollmatch.data.ids import unpack_ids

pytestmark = pytest.mark.engine
HELLO = [{"role": "user", "content": "Count."}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


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


@pytest.mark.scenario(clauses=["server-dialects/the-openai-dialect-serves-openai-clients#13"])
def test_images_alone_are_a_content_with_the_prompt_of_the_native_route(client, server, base, scene_requests):
    url = data_url(Path(scene_requests[0].sample.images[0]))
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    reply = ask(client, [{"role": "user", "content": parts}], max_tokens=4, extra_body={"return_token_ids": True})
    request = {"request_id": "0", "messages": [{"role": "user", "content": [{"type": "image"}]}], "images": [url]}
    status, body = server.post("/native/infer/", {"requests": [request], "sampling": {"max_tokens": 4}})
    assert status == 200, body
    assert reply.prompt_token_ids == body["responses"][0]["prompt_token_ids"]


@pytest.mark.scenario(
    "server-dialects/token-ids-go-in-and-come-out",
    clauses=["server-dialects/the-openai-dialect-serves-openai-clients#10"],
)
def test_token_ids_with_an_image_have_the_ids_and_logprobs_of_the_native_route(server, base, scene_requests, greedy):
    (request, *_), image_id = scene_requests, template_of().image_id
    prompt_ids, url = list(request.prompt_token_ids), data_url(Path(request.sample.images[0]))
    requests = [{"request_id": "0", "prompt_token_ids": prompt_ids, "images": [url]}]
    status, native = server.post("/native/infer/", {"requests": requests, "sampling": greedy | {"logprobs": True}})
    assert status == 200, native
    sampling = greedy | {"temperature": 0.0, "logprobs": 1, "routed_experts_prompt_start": 0}
    parts = [{"type": "image_url", "url": url}]
    body = {"token_ids": prompt_ids, "content_parts": parts, "return_token_ids": True, "sampling_params": sampling}
    status, reply = server.post("/inference/v1/generate", body)
    assert status == 200, reply
    (expected,), (choice,) = native["responses"], reply["choices"]
    assert choice["token_ids"] == expected["response_token_ids"]
    entries = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == pytest.approx(expected["logprobs"], abs=1e-5)
    assert [entry["token"] for entry in entries] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert (reply["prompt_token_ids"], reply["policy_version"]) == (expected["prompt_token_ids"], server.version)
    (run,) = reply["mm_placeholders"]["image"]
    placed = reply["prompt_token_ids"][run["offset"] : run["offset"] + run["length"]]
    assert set(placed) == {image_id}
    assert reply["prompt_token_ids"].count(image_id) == run["length"] > 1


@pytest.mark.scenario(clauses=["server-dialects/our-server-serves-trainers-of-stock-vllm-servers#11"])
def test_images_that_were_rendered_belong_to_any_prompt_with_as_many(server, base, scene_requests, greedy):
    (request, *_) = scene_requests
    prompt_ids, url = list(request.prompt_token_ids), data_url(Path(request.sample.images[0]))
    requests = [{"request_id": "0", "prompt_token_ids": prompt_ids, "images": [url]}]
    _, native = server.post("/native/infer/", {"requests": requests, "sampling": greedy})
    (expected,) = native["responses"]
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": str(MODEL), "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    status, rendered = server.post("/v1/chat/completions/render", body)
    assert status == 200, rendered
    (place,) = rendered["features"]["mm_placeholders"]["image"]
    assert rendered["token_ids"][place["offset"]] == template_of().image_id
    for token_ids in (prompt_ids, expected["prompt_token_ids"]):
        sampling = greedy | {"temperature": 0.0, "output_kind": 2, "n": 2}
        body = {"token_ids": token_ids, "features": rendered["features"], "sampling_params": sampling}
        status, reply = server.post("/inference/v1/generate", body)
        assert status == 200, reply
        assert [choice["token_ids"] for choice in reply["choices"]] == [expected["response_token_ids"]] * 2


def test_a_prompt_without_images_is_rendered_without_features(server, base):
    body = {"messages": [{"role": "user", "content": "5"}]}
    status, rendered = server.post("/v1/chat/completions/render", body)
    assert (status, rendered["features"]) == (200, None)
    assert rendered["token_ids"]


@pytest.mark.scenario(
    "server-dialects/a-seed-counts-up-over-the-choices",
    clauses=["server-dialects/the-openai-dialect-serves-openai-clients#2"],
)
def test_choices_of_several_prompts_repeat_by_their_seed(client, server, base):
    """18 choices are two calls of the engine, of which the second ends first."""
    prompts, num = [[5, 6], [7, 8, 9]], 18
    stops = {str(template_of().vocabulary.stop_id): 6.0}
    sampling = {"max_tokens": 60, "temperature": 1.0, "logit_bias": stops}
    options = {"n": num, "seed": 3, "logprobs": 0, "extra_body": {"return_token_ids": True, "prompt_logprobs": 1}}
    raw = client.completions.with_raw_response.create(model=str(MODEL), prompt=prompts, **options, **sampling)
    reply = raw.parse()
    assert [choice.index for choice in reply.choices] == [*range(2 * num)]
    assert {choice.policy_version for choice in reply.choices} == {reply.policy_version} == {server.version}
    assert (raw.headers["x-policy-version"], raw.headers["content-type"]) == (str(server.version), "application/json")
    repeated = [ids for ids in prompts for _ in range(num)]
    expected = native(server, repeated, seeds=[3 + place for place in range(2 * num)], **sampling)
    for choice, (prompt_ids, ids, logprobs) in zip(reply.choices, expected, strict=True):
        assert (choice.prompt_token_ids, choice.token_ids) == (prompt_ids, ids)
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-5)
        assert len(choice.prompt_logprobs) == len(prompt_ids)
        assert all(str(each) in likely for each, likely in zip(prompt_ids[1:], choice.prompt_logprobs[1:], strict=True))
    lens = [len(choice.token_ids) for choice in reply.choices]
    assert any(max(lens[start + 16 : start + num]) < max(lens[start : start + 16]) for start in (0, num)), lens


@pytest.mark.scenario(clauses=["server-dialects/the-openai-dialect-serves-openai-clients#3,4"])
def test_a_stream_is_the_whole_answer_in_parts_of_one_version(client, server, base):
    fields = {"max_tokens": 120, "temperature": 1.0, "seed": 5, "n": 2, "extra_body": {"return_token_ids": True}}
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
    assert len(chunks) > 6  # however often a busy machine hands out several tokens at once


def test_responses_are_of_the_structure_that_is_requested(client, base, blanks):
    chosen = ask(client, max_tokens=40, extra_body={"structured_outputs": {"regex": "[ab]{3}"}})
    assert set(chosen.choices[0].message.content) <= set("ab")
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    written = ask(client, max_tokens=60, logit_bias=blanks, response_format=wanted).choices[0].message.content
    assert isinstance(json.loads(written)["a"], bool)


@pytest.fixture
def blanks():
    """A ban on blank tokens: a JSON text may have any number of them."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return {str(i): -100.0 for i in range(len(tokenizer)) if tokenizer.decode([i]).isspace()}


def look(*, strict):
    """A tool; a strict one is called with arguments of its schema only."""
    return {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": strict}}


@pytest.mark.scenario(
    "server-dialects/a-tool-call-is-parsed", clauses=["server-dialects/the-openai-dialect-serves-openai-clients#9"]
)
@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "look"}}, "required"])
def test_a_forced_tool_call_is_parsed_and_its_result_can_be_sent_back(client, base, blanks, choice):
    fields = {"tools": [look(strict=True)], "max_tokens": 100, "temperature": 0.0, "logit_bias": blanks}
    message = ask(client, tool_choice=choice, **fields).choices[0].message
    (call,) = message.tool_calls
    assert (call.type, call.function.name) == ("function", "look")
    assert isinstance(json.loads(call.function.arguments)["a"], bool)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Seen."}
    said = message.model_dump(exclude_none=True)
    then = ask(client, [*HELLO, said, result], tools=[look(strict=True)], max_tokens=4)
    assert then.usage.prompt_tokens > ask(client, max_tokens=1).usage.prompt_tokens


@pytest.mark.scenario(clauses=["server-dialects/the-openai-dialect-serves-openai-clients#9"])
def test_a_tool_call_that_the_model_writes_by_itself_is_parsed_whole_and_in_a_stream(client, base):
    written = r'<tool_call>\n\{"name": "look", "arguments": \{"a": (true|false)\}\}\n</tool_call>'
    fields = {"tools": [look(strict=False)], "tool_choice": "auto", "max_tokens": 100, "temperature": 0.0}
    fields["extra_body"] = {"structured_outputs": {"regex": written}}
    (choice,) = ask(client, **fields).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name, choice.message.content) == ("tool_calls", "look", None)
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **fields)]
    parts = [part.function for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert [part.name for part in parts if part.name] == ["look"]
    arguments = "".join(part.arguments or "" for part in parts)
    assert json.loads(arguments) == json.loads(call.function.arguments)
    assert chunks[-1].finish_reason == "tool_calls"


def test_what_an_engine_would_not_take_is_refused_by_its_own_code(server, base):
    body = {"prompt": [[5], [4000]], "max_tokens": 1}
    reply = requests.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert (reply.json()["code"], reply.json()["key"]) == ("token-id-invalid", "prompt[1].prompt_token_ids")
