"""Chat templates that do not write what a sample holds, prompts that are rendered already, and turns in the middle."""

import json
import shutil
from dataclasses import replace
from functools import cache

import pytest

from conformance.doubles.refusals import refused
from conformance.doubles.talker import TEXT
from conformance.doubles.tokenizer_checks import every_kind
from conformance.tools.tokenizers import fetch_tokenizer
from rollmatch.data import load_samples
from rollmatch.data.jsonl import SystemMessages
from rollmatch.model.template import Template, TemplateOptions
from rollmatch.records import Sample


@cache
def template_of(name, **chat):
    """Of a real tokenizer."""
    return Template(fetch_tokenizer(name), system="", user="", any_chat=True, options=TemplateOptions(chat=chat))


ASKED = Sample(sample_id=0, origin="x.jsonl:7", images=(), messages=(("system", "Be brief."), ("user", "2+2?")))
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def template_with(folder, chat, **options):
    place = shutil.copytree(TEXT, folder / "model")
    (place / "chat_template.jinja").unlink()
    if chat is not None:
        (place / "chat_template.jinja").write_text(chat)
    return Template(place, system="", user="", any_chat=True, options=TemplateOptions(**options))


@pytest.mark.scenario(
    "rollout-backends/a-chat-template-that-drops-the-system-text-is-refused",
    clauses=["rollout-backends/a-prompt-is-rendered-whole-or-refused#1"],
)
@pytest.mark.parametrize(
    ("chat", "fields", "problem"),
    [
        (None, {}, "the model has none"),
        ("{{ raise_exception('no role system') }}", {}, "no role system"),
        ("{{ messages[0].nothing.there }}", {}, "fails"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", {}, "leaves out the system text"),
        ("{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}", {}, "leaves out the user text"),
        (TURNS + BEGIN, {"tools": (TOOL,)}, "leaves out the tool add"),
    ],
)
def test_what_a_chat_template_does_not_write_is_named_with_the_sample(tmp_path, chat, fields, problem):
    template = template_with(tmp_path, chat)
    with refused("prompt-not-rendered", "x.jsonl:7", problem=problem):
        template.prompt_length(replace(ASKED, **fields))


PARTS = (
    "{% for m in messages %}{% for part in m.content if part.type == 'text' %}{{ part.text }};{% endfor %}{% endfor %}"
)
"""As templates of vision models (SmolVLM, LLaVA): they write nothing of a message that is a text."""


@pytest.mark.scenario(clauses=["rollout-backends/a-prompt-is-rendered-whole-or-refused#2"])
@pytest.mark.parametrize("messages", [ASKED.messages, ()])
def test_a_template_gets_texts_or_parts_as_it_takes_them(tmp_path, messages):
    """A sample's own messages, and the configured prompts; Qwen3's own template fails on parts."""
    shutil.copytree(TEXT, tmp_path / "parts")
    (tmp_path / "parts/chat_template.jinja").write_text(PARTS)
    written = {tmp_path / "parts": "Be brief.;2+2?;", fetch_tokenizer("qwen3"): "Be brief.<|im_end|>"}
    for directory, begin in written.items():
        template = Template(directory, system="Be brief.", user="2+2?", any_chat=True)
        prompt = template.vocabulary.decode(template.prompt_token_ids(replace(ASKED, messages=messages))).decode()
        assert begin in prompt
        assert "2+2?" in prompt


@pytest.mark.parametrize("name", every_kind(["qwen3", "llama3_1", "mistral_nemo", "mistral_v3", "gptoss"]))
def test_real_templates_write_tools(name):
    template = template_of(name)
    sample = replace(ASKED, tools=(TOOL,))
    assert "add" in template.vocabulary.text(template.prompt_token_ids(sample))


@pytest.mark.parametrize("name", every_kind(["llama3", "gemma3", "deepseek_v3", "llama2", "smollm2"]))
def test_real_templates_that_leave_tools_out_are_refused(name):
    template = template_of(name)
    with refused("prompt-not-rendered", "x.jsonl:7", problem="the tool add"):
        template.prompt_token_ids(replace(ASKED, tools=(TOOL,)))


@pytest.mark.scenario(clauses=["rollout-backends/a-prompt-is-rendered-whole-or-refused#3"])
def test_a_prompt_that_is_rendered_already_is_taken_as_it_is_with_a_warning(tmp_path):
    template = template_with(tmp_path, TURNS + BEGIN)
    plain = replace(ASKED, messages=(("user", "2+2?"),), has_text_prompt=True)
    rendered = template.vocabulary.decode(template.prompt_token_ids(plain)).decode()
    assert rendered == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    with pytest.warns(UserWarning, match=r"x.jsonl:7: the prompt holds markers"):
        again = template.prompt_token_ids(replace(plain, messages=(("system", "S"), ("user", rendered))))
    assert template.vocabulary.decode(again).decode() == rendered


@pytest.mark.scenario(clauses=["rollout-backends/a-prompt-is-rendered-whole-or-refused#4"])
def test_calls_of_tools_reach_the_chat_template(tmp_path):
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    chat = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "4"},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": chat}) + "\n")
    (sample,) = load_samples(path, systems=SystemMessages(chats=True))
    chat = (
        "{% for m in messages %}{{ m.role }}={{ m.content }}"
        "{% for call in m.tool_calls or () %}{{ call.function.name }}({{ call.function.arguments.a }}){% endfor %}"
        "{{ m.reasoning_content or '' }}{{ m.tool_call_id or '' }};{% endfor %}"
    )
    template = template_with(tmp_path, chat)
    assert template.vocabulary.text(template.prompt_token_ids(sample)) == "user=2+2?;assistant=add(2)hm;tool=4c1;"


@pytest.mark.scenario(clauses=["rollout-backends/a-prompt-is-rendered-whole-or-refused#5"])
@pytest.mark.parametrize(
    ("name", "chat", "problem"),
    [
        ("qwen3", {}, "takes thoughts out of turns that are over"),
        ("gemma3", {}, None),
        *(
            pytest.param(name, {}, None, marks=pytest.mark.wide)
            for name in ("llama3", "llama3_1", "deepseek_v3", "mistral_nemo", "smollm2", "qwen3_vl")
        ),
        ("gptoss", {}, "<|channel|>final<|message|>' before a turn that is over"),
        ("llama2", {}, "before a turn that is over"),
        ("mistral_v3", {}, "before a turn that is over"),
    ],
)
def test_an_episode_of_a_real_model_is_the_whole_chat_or_refused(name, chat, problem):
    template = template_of(name, **chat)
    if problem:
        with refused("turns-not-rendered", "model.model", problem=problem, remedy="text"):
            template.reply_token_ids("no", is_stopped=True)
        return
    vocabulary = template.vocabulary
    asked = Sample(sample_id=0, origin="x:1", images=(), messages=(("user", "2+2?"),))
    turn = (*vocabulary.encode("5"), vocabulary.stop_id)
    episode = (*template.prompt_token_ids(asked), *turn, *template.reply_token_ids("no", is_stopped=True))
    whole = replace(asked, messages=(("user", "2+2?"), ("assistant", "5"), ("user", "no")))
    assert episode == template.prompt_token_ids(whole)


@pytest.mark.scenario(clauses=["rollout-backends/a-prompt-is-rendered-whole-or-refused#7"])
def test_an_empty_thought_stays_in_the_turns_of_an_episode():
    """As TRL's training template of Qwen3 writes it."""
    template = template_of("qwen3", enable_thinking=False)
    template.check_turns(ASKED)
    template.check_tools([TOOL])
    prompt = template.vocabulary.decode(template.prompt_token_ids(ASKED)).decode()
    reply = template.vocabulary.decode(template.reply_token_ids("no", is_stopped=False)).decode()
    begun = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert prompt.endswith(begun)
    assert reply == f"<|im_end|>\n<|im_start|>user\nno<|im_end|>\n{begun}"


@pytest.mark.scenario(clauses=["rollout-backends/a-prompt-is-rendered-whole-or-refused#6"])
@pytest.mark.parametrize("fields", [{"messages": ASKED.messages}, {"tools": (TOOL,)}], ids=["system", "tools"])
@pytest.mark.parametrize(
    ("name", "is_refused"),
    [("mistral_nemo", True), pytest.param("llama3_1", False, marks=pytest.mark.wide), ("qwen3_vl", False)],
)
def test_a_template_that_moves_the_prompt_behind_a_turn_is_refused_with_the_sample(name, is_refused, fields):
    template = template_of(name)
    plain = replace(ASKED, messages=ASKED.messages[1:])
    template.check_turns(plain)
    if is_refused:
        with refused("turns-not-rendered", "x.jsonl:7", problem="system text or tools", remedy="text"):
            template.check_turns(replace(plain, **fields))
    else:
        template.check_turns(replace(plain, **fields))
