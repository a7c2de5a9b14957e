"""Chats with tool calls: a caller may write arguments as text, as OpenAI's clients return them, or as an object."""

import pytest

from conformance.doubles.stand_in import make_parts
from rollmatch.server.payloads import Sampling
from rollmatch.server.prompts import GenerateRequest

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% endfor %}"
)
"""Shows a call as it gets it."""


@pytest.fixture
def ids_of(monkeypatch):
    prompts = make_parts().prompts
    monkeypatch.setattr(prompts.tokenizer, "chat_template", TEMPLATE)

    def make(*calls, role="assistant"):
        messages = ({"role": "user", "content": "1?"}, {"role": role, "content": "", "tool_calls": list(calls)})
        request = GenerateRequest(messages=messages, sampling=Sampling(max_tokens=1))
        return prompts.make(request, prompts.reader.budget(), item=0).token_ids

    return make


def call(arguments):
    return {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.scenario(clauses=["server-dialects/the-openai-dialect-serves-openai-clients#12"])
@pytest.mark.parametrize(
    ("written", "meant"),
    [('{"a": {"b": [1, "2"]}}', {"a": {"b": [1, "2"]}}), ("", {}), (None, {}), ("[1]", {}), ('{"a": ', {})],
)
def test_arguments_as_text_are_the_object_they_spell_as_on_vllms_routes(ids_of, written, meant):
    assert ids_of(call(written), call({"c": 1})) == ids_of(call(meant), call('{"c": 1}'))
    assert ids_of(call({"a": 1})) != ids_of(call(meant))


def test_an_empty_list_of_calls_is_none_and_other_roles_stay_as_they_are(ids_of):
    assert ids_of() != ids_of(call({}))
    assert ids_of(call('{"a": 1}'), role="user") != ids_of(call({"a": 1}), role="user")
