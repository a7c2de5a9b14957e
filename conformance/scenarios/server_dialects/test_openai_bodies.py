"""The OpenAI routes over pretending engines: what is refused before vLLM sees it, and streams during a commit."""

import asyncio
from types import SimpleNamespace

import pytest

from conformance.doubles.refusals import refused
from conformance.doubles.request_bodies import IMAGE, call, picture
from conformance.doubles.stand_in import PretendingReplica, commit
from rollmatch.dialects.openai.answers import Endpoint
from rollmatch.dialects.openai.bodies import ChatBody
from rollmatch.dialects.openai.engine import CallNotes, PooledEngine, notes
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.failures import Refusal
from rollmatch.server.prompts import EnginePrompt
from rollmatch.server.replica import EnginePart

pytestmark = pytest.mark.anyio

CHAT, COMPLETION, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
FEATURES = {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{}]}, "kwargs_data": {"image": ["AA=="]}}
PASSED = (501, "openai-unavailable", "vllm")
"""What follows where nothing is refused: pretending engines are not vLLM's."""


def chat(*content, **fields):
    return {"messages": [{"role": "user", "content": list(content) or "Look."}]} | fields


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def user(text):
    return {"role": "user", "content": text}


TOP = chat(logprobs=True, max_tokens=9, max_completion_tokens=3)
SMALL = image(f"data:image/png;base64,{picture(40, 30)}")
FOREIGN = image("https://example.org/a.png")


@pytest.mark.scenario(
    "server-dialects/an-openai-call-with-an-unknown-field-is-refused",
    clauses=["server-dialects/the-openai-dialect-serves-openai-clients#7"],
)
@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        (CHAT, chat(best_off=2), (422, "body-invalid", "best_off")),
        (CHAT, chat(chat_template="{{ x }}"), (422, "body-invalid", "chat_template")),
        (CHAT, chat(mm_processor_kwargs={"size": 9}), (422, "body-invalid", "mm_processor_kwargs")),
        (CHAT, chat(use_beam_search=True), (422, "body-invalid", "use_beam_search")),
        (CHAT, chat({"type": "video_url", "video_url": {"url": "data:,"}}), (422, "body-invalid", None)),
        (CHAT, chat({"type": "image_pil", "image_pil": None}), (422, "body-invalid", None)),
        (CHAT, chat(temperature=3), (400, "sampling-value-invalid", "temperature")),
        (CHAT, chat(logit_bias={"9999": 1.0}), (400, "sampling-value-invalid", "logit_bias")),
        (CHAT, chat(n=2000), (422, "call-too-large", "n")),
        (CHAT, chat(top_logprobs=21), (422, "body-invalid", "top_logprobs")),
        (CHAT, chat(FOREIGN), (400, "image-url-refused", "messages.images[0]")),
        (CHAT, chat(image("/etc/passwd")), (403, "image-path-outside-roots", "messages.images[0]")),
        (CHAT, chat(image("data:image/png;base64,aGVsbG8=")), (400, "image-unreadable", "messages.images[0]")),
        (COMPLETION, {"prompt": [[-1]]}, (422, "body-invalid", None)),
        (CHAT, chat(prompt_logprobs=1), (422, "body-invalid", "prompt_logprobs")),
        (COMPLETION, {"prompt": "a", "prompt_logprobs": -1}, (422, "body-invalid", "prompt_logprobs")),
        (COMPLETION, {"prompt": [5] * 400, "prompt_logprobs": 9999}, (422, "call-too-large", "prompt_logprobs")),
        (COMPLETION, {"prompt": "a", "prompt_logprobs": 9999}, (422, "call-too-large", "prompt_logprobs")),
        ("/detokenize", {"tokens": [5], "model": "other"}, (404, "model-unknown", "model")),
        ("/detokenize", {"tokens": ["a"]}, (422, "body-invalid", None)),
        (COMPLETION, {"prompt": "a", "max_completion_tokens": 1}, (422, "body-invalid", "max_completion_tokens")),
        (TOKENS, {"token_ids": [5], "model": "other"}, (404, "model-unknown", "model")),
        (TOKENS, {"token_ids": [5], "features": {"mm_hashes": {}}}, (422, "body-invalid", "features.mm_placeholders")),
        (TOKENS, {"token_ids": [5], "features": FEATURES}, (400, "images-misfit", None)),
        (TOKENS, {"token_ids": [5], "sampling_params": {"temperature": 3}}, (400, "sampling-value-invalid", None)),
        (TOKENS, {"token_ids": [5] * 512}, (400, "prompt-too-long", "token_ids[0]")),
        (TOKENS, {"token_ids": [5], "content_parts": [{"type": "image_url", "url": "data:,"}]}, (400, None, None)),
        (
            TOKENS,
            {"token_ids": [5], "sampling_params": {"prompt_logprobs": -1}},
            (400, "sampling-value-invalid", "prompt_logprobs"),
        ),
        (
            TOKENS,
            {"token_ids": [5] * 400, "sampling_params": {"prompt_logprobs": 9999, "max_tokens": 1}},
            (422, "call-too-large", "prompt_logprobs"),
        ),
        (CHAT, chat(SMALL, user="me", store=False, metadata={"a": "b"}, n=2, seed=1), PASSED),
        (COMPLETION, {"prompt": [[5], [6]], "echo": False, "best_of": 1, "suffix": None, "user": "me"}, PASSED),
    ],
)
def test_fields_and_values_are_checked_before_vllm(served, route, body, expected):
    _, client = served()
    status, code, key = call(client, route, body)
    assert status == expected[0]
    assert expected[1] in (None, code)
    assert expected[2] in (None, key)


COMPLETION_BOUNDS = {
    "n": (0, 1),
    "max_tokens": (0, 1),
    "max_tokens of 31 bits": (2**31, 2**31 - 1),
    "stop": ("", "a"),
    "stop, longest": ("a" * 1025, "a" * 1024),
    "bad_words": (["a"] * 1025, ["a"] * 1024),
    "allowed_token_ids": ([-1], [0]),
    "allowed_token_ids of 31 bits": ([2**31], [2**31 - 1]),
    "length_penalty": (1.5, 1),
    "length_penalty, least": (0.5, 1),
}
TOKEN_BOUNDS = {
    "n": (0, 1),
    "stop": ("", "a"),
    "stop, longest": ("a" * 1025, "a" * 1024),
    "logprobs": (21, 20),
    "logprobs, least": (-1, 0),
}
BOUNDS = [
    *(
        (COMPLETION, {"prompt": "a"}, name.split(maxsplit=1)[0].strip(","), *values)
        for name, values in COMPLETION_BOUNDS.items()
    ),
    (CHAT, {}, "messages", [], chat()["messages"]),
    (CHAT, chat(logprobs=True), "top_logprobs", 21, 20),
    (CHAT, chat(logprobs=True), "top_logprobs", -1, 0),
    (TOKENS, {"token_ids": [5]}, "request_id", "a" * 1025, "a" * 1024),
    (TOKENS, {"token_ids": [5]}, "cache_salt", "a" * 1025, "a" * 1024),
    *(
        (TOKENS, {"token_ids": [5]}, f"sampling_params.{name}".split(",")[0], *values)
        for name, values in TOKEN_BOUNDS.items()
    ),
]


@pytest.mark.parametrize(("route", "body", "field", "beyond", "at_the_bound"), BOUNDS)
def test_a_value_beyond_its_bound_is_refused_and_one_at_it_is_not(served, route, body, field, beyond, at_the_bound):
    _, client = served()
    outer, _, inner = field.partition(".")
    refused, accepted = (
        call(client, route, body | {outer: {inner: value} if inner else value}) for value in (beyond, at_the_bound)
    )
    assert refused[:2] == ((400, "sampling-value-invalid") if inner else (422, "body-invalid"))
    assert accepted[1] not in ("sampling-value-invalid", "body-invalid")


CODES = {"max_waiting_responses": (429, "server-busy"), "max_text_bytes": (400, "prompt-too-long")}
CODES |= {"max_body_bytes": (413, "body-too-large")}
CODES |= dict.fromkeys(("max_pixels_per_image", "max_pixels_per_call"), (413, "image-too-large"))
"""Limit -> status and code of what is above it, where it is no ``call-too-large``."""


@pytest.mark.parametrize(
    ("limits", "route", "over", "within"),
    [
        ({"max_prompts_per_call": 1}, COMPLETION, {"prompt": ["a", "b"]}, {"prompt": ["a"]}),
        ({"max_responses_per_call": 3}, COMPLETION, {"prompt": ["a", "b"], "n": 2}, {"prompt": ["a"], "n": 2}),
        ({"max_waiting_responses": 5}, COMPLETION, {"prompt": ["a", "b", "c"], "n": 2}, {"prompt": ["a", "b"], "n": 2}),
        ({"max_tokens_per_call": 3}, COMPLETION, {"prompt": [[5, 5], [5, 5]]}, {"prompt": [[5, 5], [5]]}),
        ({"max_text_bytes": 40}, COMPLETION, {"prompt": "a" * 41}, {"prompt": ["a" * 40, "b"]}),
        ({"max_text_bytes": 40}, COMPLETION, {"prompt": "\u00e9" * 21}, {"prompt": "\u00e9" * 20}),
        ({"max_text_bytes": 60}, CHAT, {"messages": [user("\u00e9" * 20)]}, {"messages": [user("e" * 20)]}),
        ({"max_logprobs_per_call": 57}, CHAT, TOP | {"top_logprobs": 19}, TOP | {"top_logprobs": 18}),
        ({"max_text_bytes": 40}, CHAT, chat({"type": "text", "text": "a" * 41}), chat()),
        ({"max_text_bytes": 120}, CHAT, chat(chat_template_kwargs={"a": "b" * 120}), chat(SMALL)),
        ({"max_images_per_call": 1}, CHAT, chat(SMALL, SMALL), chat(SMALL)),
        ({"max_pixels_per_image": 1199}, CHAT, chat(SMALL), chat(image(picture(4, 3)))),
        ({"max_pixels_per_call": 2399}, CHAT, chat(SMALL, SMALL), chat(SMALL)),
        ({"max_body_bytes": 400}, COMPLETION, {"prompt": "a" * 400}, {"prompt": "a"}),
    ],
)
def test_the_limits_of_the_other_dialects_hold(served, limits, route, over, within):
    _, client = served(**limits)
    status, code, _ = call(client, route, over)
    (limit,) = limits
    assert (status, code) == CODES.get(limit, (422, "call-too-large"))
    assert call(client, route, within) == PASSED


def test_errors_are_what_openai_clients_read(served):
    _, client = served()
    reply = client.post(CHAT, json=chat(temperature=3))
    body = reply.json()
    assert body["error"]["code"] == body["code"] == "sampling-value-invalid"
    assert (body["error"]["param"], body["error"]["type"]) == ("temperature", "invalid_request_error")
    assert body["error"]["message"] == body["detail"]
    packed = client.post(CHAT, content=b"\x80", headers={"content-type": "application/msgpack"})
    assert packed.status_code == 415
    missing = client.get("/v1/models")
    assert (missing.status_code, missing.json()["error"]["type"]) == (501, "server_error")


@pytest.mark.parametrize(("status", "code"), [(404, "model-unknown"), (400, "engine-refused"), (501, "engine-refused")])
async def test_a_refusal_of_vllm_has_a_code_of_ours(status, code):
    async def refuse(body):
        return SimpleNamespace(error=SimpleNamespace(message="no", code=status))

    endpoint = Endpoint(request_type=ChatBody, answer=refuse, misread=())
    with pytest.raises(Refusal) as caught:
        await endpoint.begin(chat(), CallNotes())
    assert caught.value.code == code


def test_a_key_guards_these_routes_too(start):
    _, _, client = start(api_key="secret")
    assert client.post(CHAT, json=chat()).status_code == 401
    assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 501


def test_an_image_placeholder_in_a_text_is_a_token_like_any_other_for_the_check(served):
    parts, _ = served()
    assert parts.prompts.image_id == IMAGE
    with pytest.raises(Refusal, match="1 image placeholders for 0 images"):
        parts.prompts.check([5, IMAGE], 0, item=0, key="prompt[0]")


def test_only_what_was_given_reaches_vllm():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    body = ChatBody.model_validate(chat(SMALL, tools=tools, user="me", best_of=1, temperature=None))
    assert body.for_vllm().keys() == {"messages", "tools"}
    assert body.for_vllm()["tools"] == tools
    (content,) = body.parts(["the image"])
    assert content == [{"type": "image_pil", "image_pil": "the image"}]


def test_tokens_of_texts_are_counted_when_vllm_has_made_them(served):
    """And before a response to any of them is generated."""
    parts, _ = served(max_tokens_per_call=5)
    renderer = SimpleNamespace(process_for_engine_async=None)
    fields = dict.fromkeys(("vllm_config", "model_config", "input_processor"))
    engine = PooledEngine(parts, SimpleNamespace(**fields, renderer=renderer))
    notes.set(call_notes := CallNotes())
    engine.generate({"prompt_token_ids": [5] * 5}, None, "0")
    with refused("call-too-large", "prompt"):
        engine.generate({"prompt_token_ids": [5]}, None, "1")
    assert call_notes.error.code == "call-too-large"


class StreamingReplica(PretendingReplica):
    """Writes one part, then waits for ``go`` before the last one."""

    def __init__(self):
        super().__init__(0)
        self.go, self.first = asyncio.Event(), asyncio.Event()
        self.first.set()

    async def stream(self, prompt, params, request_id):
        await self.first.wait()
        yield EnginePart(output=f"{request_id} begins", num_tokens=1, is_last=False)
        await self.go.wait()
        yield EnginePart(output=f"{request_id} ends", num_tokens=1, is_last=True)


def streaming():
    pool = EnginePool([StreamingReplica()])
    prompt = EnginePrompt(token_ids=[5], images=[], expanded_len=1)
    return pool, pool.replicas[0], pool.stream(prompt, None, num_responses=3)


@pytest.mark.scenario(
    "server-dialects/a-stream-that-has-not-begun-is-begun-again",
    clauses=["server-dialects/the-openai-dialect-serves-openai-clients#6"],
)
async def test_a_stream_that_has_not_begun_is_begun_again():
    pool, replica, stream = streaming()
    replica.first.clear()
    first = asyncio.create_task(anext(stream))
    while not pool._running:
        await asyncio.sleep(0)
    await commit(pool, 1, drain_s=0.0)
    replica.first.set()
    replica.go.set()
    part, version = await first
    assert (part.output, version, pool.num_running) == ("1 begins", 1, 3)
    assert [(part.output, version) async for part, version in stream] == [("1 ends", 1)]
    assert pool.num_running == 0


@pytest.mark.scenario(
    "server-dialects/a-stream-that-a-commit-does-not-wait-for-ends-with-an-error",
    clauses=["server-dialects/the-openai-dialect-serves-openai-clients#5"],
)
async def test_a_stream_that_has_begun_ends_at_a_commit_that_does_not_wait_for_it():
    pool, _, stream = streaming()
    assert (await anext(stream))[1] == 0
    await commit(pool, 1, drain_s=0.0)
    with pytest.raises(Refusal) as refused:
        await anext(stream)
    assert refused.value.code == "policy-changed"
    assert pool.num_running == 0


async def test_a_stream_that_ends_within_the_drain_is_whole_however_late_it_is_read():
    pool, replica, stream = streaming()
    await anext(stream)
    replica.go.set()
    assert await commit(pool, 1, drain_s=60.0) == 0, "nothing was ended"
    assert [(part.output, version) async for part, version in stream] == [("0 ends", 0)]
    assert pool.update.policy_version == 1


async def test_a_stream_that_is_closed_frees_its_place():
    pool, _, stream = streaming()
    await anext(stream)
    await stream.aclose()
    assert (pool.num_running, pool._running) == (0, set())


@pytest.mark.parametrize("count", [0, 3])
def test_the_likeliest_ids_are_returned_where_they_are_wanted(served, count):
    _, client = served()
    reply = client.post(TOKENS, json={"token_ids": [5], "sampling_params": {"max_tokens": 2, "logprobs": count}}).json()
    entries = reply["choices"][0]["logprobs"]["content"]
    assert [(entry["logprob"], bool(entry["top_logprobs"])) for entry in entries] == [(-1.0, count > 0)] * 2
