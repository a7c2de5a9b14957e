"""What the client for somebody else's trainer sends, and which replies it takes; engines are in test_vllm_client.py."""

import inspect

import pytest
from PIL import Image

from conformance.doubles.http_server import answering, http_server, read_body, send
from conformance.doubles.refusals import refused
from rollmatch.dialects.trl.vllm_client import VLLMClient, png_of

TEXT = {"role": "user", "content": "a"}
ROUTES = ("/health/", "/generate/", "/init_communicator/", "/update_named_param/")
REPLY = {"prompt_ids": [[1, 2]] * 2, "completion_ids": [[5, 6]] * 2}


@pytest.fixture
def call():
    """A call of the client and the server's reply -> what it returns; ``call.body`` is what was sent."""

    def run(act, reply=REPLY):
        def answer(name, body):
            if body is None:
                return 200, {"paths": {route: {} for route in ROUTES}} if name == "openapi.json" else {"status": "ok"}
            run.body = body
            return 200, reply

        with answering(answer) as url:
            return act(VLLMClient(url, connection_timeout=5.0))

    return run


def color(name: str) -> str:
    """A color.

    Args:
        name: of the color
    """
    return name


def test_tools_are_sent_as_schemas_and_images_as_png(call):
    image, given = Image.new("RGB", (2, 2)), {"tools": [{"type": "function"}, color]}
    parts = [{"type": "text", "text": "a"}, {"type": "image_pil", "image_pil": image}]
    chats = [[TEXT], [TEXT | {"content": parts}]]
    returned = call(lambda client: client.chat(chats, **given, chat_template_kwargs={"thinking": True}))
    assert returned == REPLY | {"logprobs": None, "logprob_token_ids": None}
    assert [tool.get("function", {}).get("name") for tool in call.body["tools"]] == [None, "color"]
    assert call.body["chat_template_kwargs"] == {"thinking": True}
    assert call.body["messages"] == [[TEXT], [TEXT | {"content": [parts[0], parts[1] | {"image_pil": png_of(image)}]}]]
    call(lambda client: client.generate(["a", (1, 2)], images=[[image], None]))
    assert (call.body["prompts"], call.body["images"]) == (["a", [1, 2]], [[png_of(image)], None])
    with pytest.raises(NotImplementedError, match="chat_template"):
        call(lambda client: client.chat([[TEXT]], chat_template="x"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_the_group_is_opened_at_the_host_of_the_url(host):
    opened = []

    def reply(handler):
        body, name = read_body(handler), handler.path.strip("/").rpartition("/")[2]
        if name == "init_communicator":
            opened.append(body["host"])
            return send(handler, 409, {"code": "no-group"})
        state = {"paths": {route: {} for route in ROUTES}, "world_size": 1}
        return send(handler, 200, state)

    with http_server(reply, host=host) as server:
        client = VLLMClient(server.url, connection_timeout=5.0)
        with refused("no-group"):
            client.init_communicator("cpu")
    assert opened == [host]


@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["no content", "null"])
def test_a_message_that_only_calls_tools_is_sent_as_it_is(call, content):
    chats = [[TEXT, {"role": "assistant", "tool_calls": [{"type": "function"}]} | content]] * 2
    call(lambda client: client.chat(chats))
    assert call.body["messages"] == chats


SAMPLED = {
    "n": 2, "repetition_penalty": 1.5, "temperature": 0.75, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "max_tokens": 5,
    "logprobs": 3, "structured_outputs_regex": "a+", "generation_kwargs": {"seed": 4, "stop_token_ids": [8, 9]},
}  # fmt: skip
WHOLE = {
    "prompt_ids": [[1, 2], [3]], "completion_ids": [[5, 6], [7], [8], [9, 4]],
    "logprobs": [[[-1.0], [-2.0]], [[-3.0]], [[-4.0]], [[-5.0], [-6.0]]],
    "logprob_token_ids": [[[5], [6]], [[7]], [[8]], [[9], [4]]],
}  # fmt: skip
TOOLS, VALUES = [{"type": "function"}], {"thinking": True}


@pytest.mark.parametrize(
    ("name", "given", "sent"),
    [
        ("generate", {"prompts": [(1, 2), "b"], "images": None}, {"prompts": [[1, 2], "b"], "images": None}),
        (
            "chat",
            {"messages": [[TEXT], [TEXT]], "chat_template_kwargs": VALUES, "tools": TOOLS, "chat_template": None},
            {"messages": [[TEXT], [TEXT]], "chat_template_kwargs": VALUES, "tools": TOOLS},
        ),
    ],
)
def test_every_argument_is_sent_by_its_name_and_every_field_of_the_reply_returned(call, name, given, sent):
    """TRL's names on both sides; a new argument needs a value here."""
    assert inspect.signature(getattr(VLLMClient, name)).parameters.keys() == {"self"} | (given | SAMPLED).keys()
    returned = call(lambda client: getattr(client, name)(**given, **SAMPLED), WHOLE)
    assert call.body == sent | SAMPLED
    assert returned == WHOLE


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ({"completion_ids": [[5], [6]]}, None),
        ({"completion_ids": [[5]]}, "reply-count-mismatch"),
        ({"completion_ids": [[5], ["x"]]}, "reply-malformed"),
        ({}, "reply-malformed"),
    ],
)
def test_a_completion_comes_for_each_of_n_or_it_is_an_error(call, reply, code):
    if code:
        with refused(code):
            call(lambda client: client.generate(["a"], n=2), reply)
    else:
        returned = call(lambda client: client.generate(["a"], n=2), reply)
        assert returned == dict.fromkeys(("prompt_ids", "logprobs", "logprob_token_ids")) | reply
