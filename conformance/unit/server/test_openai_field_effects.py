"""Every field of a body of OpenAI's routes is what vLLM samples and renders by, for all prompts and choices.

vLLM's own classes stand between the route and the engine (``doubles.distinct_responses``). A field without a line
fails.
"""

import base64
import copy
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from conformance.doubles.digits import MODEL
from conformance.doubles.distinct_responses import (
    DistinctVllm,
    asked_of,
    ids_of,
    posted_to,
    prompt_rows,
    response_to,
    serving,
)
from conformance.doubles.field_effects import SAMPLED, fields_of, given, with_field
from conformance.doubles.request_bodies import IMAGE, picture
from conformance.doubles.stand_in import STOP, make_parts
from rollmatch.dialects.openai.bodies import ChatBody, CompletionBody
from rollmatch.dialects.prompt import Prompt, Reply, SamplingRules
from rollmatch.dialects.vllm.client import VllmDialect

VERSION = 3
REFUSED = "refused"
A, B, C = (f"data:image/png;base64,{picture(*size)}" for size in ((40, 30), (30, 40), (50, 30)))


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


CHAT = {
    "messages": [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": [image(A), {"type": "text", "text": "Look."}, image(B)]},
    ],
    "n": 2, "seed": 4, "max_tokens": 3, "logprobs": True, "top_logprobs": 1, "return_token_ids": True,
    "request_id": "r",
}  # fmt: skip
COMPLETION = {
    "prompt": [[5, 6], [7, 8, 9]], "n": 2, "seed": 4, "max_tokens": 3, "logprobs": 1, "return_token_ids": True,
    "request_id": "r",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Its tokenizer opens every text with a special token."""
    directory = str(tmp_path_factory.mktemp("tokenizer"))
    opening = AutoTokenizer.from_pretrained(MODEL)
    processor = TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", STOP)])
    opening.backend_tokenizer.post_processor = processor
    opening.save_pretrained(directory)
    names = {"served_model_names": ("first", "second"), "tool_call_parser": "hermes"}
    parts = make_parts(kind=partial(DistinctVllm, tokenizer=directory), drain_s=0.01, max_model_len=512, **names)
    with serving(parts, version=VERSION) as made:
        yield made


TEXT = {"type": "text", "text": "Look."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER_TOOL = {"type": "function", "function": {"name": "g", "parameters": {"type": "null"}}}
SCHEMA = {"type": "object"}
CHOICES = {key: CHAT[key] for key in CHAT if key != "messages"}
WITH_TOOL = CHOICES | {
    "messages": [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": [TEXT], "tool_call_id": "c"},
    ],
    "tools": [TOOL, OTHER_TOOL],
}
WITH_ANSWER = CHOICES | {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes"}]}
CALLED = 'c.f{"a": 1}'
TOOLS = 'f{"type": "object"}g{"type": "null"}'
TAGGED = '{"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a>"]}'
BESIDE_PARSERS = {"parallel_tool_calls": False, "include_reasoning": False}
"""Fields that only concern what a parser finds in a response."""


def params(**changes):
    """Effect: so every prompt's choices are sampled."""

    def change(wanted):
        for draw in wanted.draws:
            draw["params"] |= changes

    return change


def structured(**kinds):
    """Effect: every response has this structure."""
    return params(structured_outputs=kinds)


def reseeded(first, count=2):
    """Effect: seeds that count up over the choices of all prompts."""

    def change(wanted):
        for place, draw in enumerate(wanted.draws):
            draw["params"] |= {"seed": None if first is None else first + place * count, "n": count}

    return change


def replies(**changes):
    """Effect: the reply alone is another one."""
    return lambda wanted: vars(wanted).update(changes)


def prompts(*texts, images=None):
    """Effect: the prompts, where a text is tokenised."""

    def change(wanted):
        for draw, value in zip(wanted.draws, texts, strict=True):
            draw["ids"] = wanted.ids_of(value) if isinstance(value, str) else value
            draw["images"] = draw["images"] if images is None else images

    return change


def nothing(_):
    """No effect."""


COMMON = (
    {
        name: (value, params(**{name: list(value) if name == "stop_token_ids" else given(name, value)}))
        for name, value in SAMPLED.items()
    }
    | {
        "model": ("second", nothing),
        "request_id": ("other", replies(name="other")),
        "n": (3, reseeded(4, 3)),
        "seed": (11, reseeded(11)),
        "stop": (["END", "DONE"], params(stop=["END", "DONE"])),
        "stream": (True, replies(is_streamed=True, usage=False)),
        "stream_options": ({"include_usage": True}, REFUSED),  # without stream
        "allowed_token_ids": ([3, 4], params(allowed_token_ids=[3, 4])),
        "bad_words": (["b", "c"], params(bad_words=["b", "c"])),
        "response_format": (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            structured(json=SCHEMA),
        ),
        "structured_outputs": ({"regex": "a+"}, structured(regex="a+")),
        "structured_outputs.json": (SCHEMA, structured(json=SCHEMA)),
        "structured_outputs.regex": ("b+", structured(regex="b+")),
        "structured_outputs.choice": (["a", "b"], structured(choice=["a", "b"])),
        "structured_outputs.grammar": ('root ::= "a"', structured(grammar='root ::= "a"')),
        "structured_outputs.json_object": (True, structured(json_object=True)),
        "structured_outputs.structural_tag": (TAGGED, structured(structural_tag=TAGGED)),
        "include_stop_str_in_output": (True, params(include_stop_str_in_output=True)),
        "skip_special_tokens": (False, params(skip_special_tokens=False)),
        "spaces_between_special_tokens": (False, params(spaces_between_special_tokens=False)),
        "return_token_ids": (False, replies(has_ids=False)),
        "return_tokens_as_token_ids": (True, replies(token="token_id:{}")),
    }
    | {
        name: (value, REFUSED)
        for name, value in {
            "echo": True, "use_beam_search": True, "best_of": 2, "length_penalty": 1.5, "priority": 1,
        }.items()
    }
    | dict.fromkeys(("user", "service_tier", "safety_identifier", "prompt_cache_key"), ("x", nothing))
    | {"metadata": ({"a": "b"}, nothing), "store": (True, nothing)}
)  # fmt: skip
IN_STREAM = {
    "stream_options.include_usage": (True, replies(usage=True)),
    "stream_options.continuous_usage_stats": (True, replies(usage=False)),  # counts beside the last one's
}
CHAT_LINES = COMMON | {
    "messages": ([{"role": "user", "content": "No."}], prompts("[user:No.]>", images=[])),
    "messages.content": ([TEXT, image(C)], prompts("[system:Be.][user:Look.<image>]>", images=[(50, 30)])),
    "messages.content.type": ("video_url", REFUSED),
    "messages.content.image_url": ({"url": C}, prompts("[system:Be.][user:<image>Look.<image>]>",
                                   images=[(40, 30), (50, 30)])),
    "messages.content.image_url.url": (C, prompts("[system:Be.][user:<image>Look.<image>]>",
                                       images=[(40, 30), (50, 30)])),
    "messages.content.image_url.detail": ("low", REFUSED),
    "messages.name": ("ann", prompts('[system:Be.][user:<image>Look.<image>name="ann"]>')),
    "max_completion_tokens": (6, params(max_tokens=6)),
    "logprobs": (False, REFUSED),  # beside top_logprobs
    "top_logprobs": (0, lambda wanted: (params(logprobs=0)(wanted), replies(num_top=0)(wanted))),
    "tools": ([TOOL, OTHER_TOOL], prompts(TOOLS + "[system:Be.][user:<image>Look.<image>]>")),
    "tool_choice": ("required", REFUSED),  # without tools
    "reasoning_effort": ("low", prompts("[system:Be.][user:<image>Look.<image>]low>")),
    "add_generation_prompt": (False, prompts("[system:Be.][user:<image>Look.<image>]")),
    "add_special_tokens": (True, prompts("<|im_end|>[system:Be.][user:<image>Look.<image>]>")),
    "continue_final_message": (True, REFUSED),  # beside a generation prompt
    "chat_template_kwargs": ({"pace": "slow", "mood": "gay"},
                             prompts("gayslow[system:Be.][user:<image>Look.<image>]>")),
    "modalities": (["text"], nothing),
}  # fmt: skip
TOOL_LINES = {
    "messages.content.text": ("No.", prompts(f'{TOOLS}[user:Add.][assistant:{CALLED}][tool:No.tool_call_id="c"]>')),
    "messages.tool_call_id": ("d", prompts(f'{TOOLS}[user:Add.][assistant:{CALLED}][tool:Look.tool_call_id="d"]>')),
    "tool_choice": ("none", params(skip_special_tokens=True)),
}
ANSWER_LINES = {
    "messages.role": ("user", prompts("[user:Hi.][user:Yes]>")),
    "messages.tool_calls": ([CALL], prompts(f"[user:Hi.][assistant:Yes{CALLED}]>")),
    "messages.reasoning": ("why", prompts('[user:Hi.][assistant:Yesreasoning="why"]>')),
    "messages.reasoning_content": ("why", prompts('[user:Hi.][assistant:Yesreasoning="why"]>')),
}
COMPLETION_LINES = COMMON | {
    "prompt": ([[5, 6], "Look."], REFUSED),
    "logprobs": (0, lambda wanted: (params(logprobs=0)(wanted), replies(num_top=0)(wanted))),
    "prompt_logprobs": (1, params(prompt_logprobs=1)),
}
OF_TEXT = {
    "prompt": (["No.", "Hm."], prompts("<|im_end|>No.", "<|im_end|>Hm.")),
    "add_special_tokens": (False, prompts("Look.", "Well.")),
}
ROUTES = {
    "chat": (ChatBody, CHAT, ["[system:Be.][user:<image>Look.<image>]>"], [(40, 30), (30, 40)], CHAT_LINES),
    "chat, tool": (ChatBody, WITH_TOOL, [f'{TOOLS}[user:Add.][assistant:{CALLED}][tool:Look.tool_call_id="c"]>'], [],
                   TOOL_LINES),
    "chat, answer": (ChatBody, WITH_ANSWER, ["[user:Hi.][assistant:Yes]>"], [], ANSWER_LINES),
    "chat, streamed": (ChatBody, CHAT | {"stream": True}, ["[system:Be.][user:<image>Look.<image>]>"],
                       [(40, 30), (30, 40)], IN_STREAM),
    "completion": (CompletionBody, COMPLETION, COMPLETION["prompt"], [], COMPLETION_LINES),
    "completion, texts": (CompletionBody, COMPLETION | {"prompt": ["Look.", "Well."]},
                          ["<|im_end|>Look.", "<|im_end|>Well."], [], OF_TEXT),
    "completion, streamed": (CompletionBody, COMPLETION | {"stream": True}, COMPLETION["prompt"], [], IN_STREAM),
}  # fmt: skip
PATHS = {ChatBody: "/v1/chat/completions/", CompletionBody: "/v1/completions/"}


class Wanted(SimpleNamespace):
    """What a call leads to: draws of the engine, and what its reply is made of."""

    def choices(self):
        rows = [(draw, response_to(draw["params"]["seed"] + copy), draw["params"]["seed"] + copy)
                for draw in self.draws for copy in range(draw["params"]["n"])]  # fmt: skip
        for index, (draw, one, seed) in enumerate(rows):
            is_chat, of_prompt = self.kind is ChatBody, draw["params"]["prompt_logprobs"]
            likeliest = one.likeliest(self.num_top)
            tops = [
                [pair for pair in row if not is_chat or pair is row[0]] if self.num_top else [] for row in likeliest
            ]
            yield {
                "index": index,
                "text": f"text {seed}",
                "finish_reason": one.reason,
                "token_ids": one.ids if self.has_ids else None,
                "prompt_token_ids": draw["ids"] if self.has_ids else None,
                "policy_version": VERSION,
                "logprobs": [(self.token.format(token_id), value)
                             for token_id, value in zip(one.ids, one.logprobs, strict=True)],
                "tops": [sorted((self.token.format(token_id), value) for token_id, value in row) for row in tops],
                "prompt_logprobs": None if of_prompt is None else [
                    {str(token_id): vars(entry) for token_id, entry in row.items()} or None
                    for row in prompt_rows(draw["ids"])
                ],
            }  # fmt: skip

    def reply(self):
        choices = list(self.choices())
        num_prompt = sum(len(draw["ids"]) for draw in self.draws)
        num_written = sum(len(response_to(draw["params"]["seed"] + copy).ids)
                          for draw in self.draws for copy in range(draw["params"]["n"]))  # fmt: skip
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_written}
        return {
            "id": ("chatcmpl-" if self.kind is ChatBody else "cmpl-") + self.name,
            "model": "first",
            "policy_version": VERSION,
            "usage": usage | {"total_tokens": num_prompt + num_written} if self.usage else None,
            "choices": choices,
        }


def view_of(body, kind):
    """A reply in the words of ``Wanted.reply``."""

    def values_of(found, choice):
        if not found:
            return None, None
        if kind is CompletionBody:
            tops = found["top_logprobs"] or [{}] * len(found["tokens"])
            return list(zip(found["tokens"], found["token_logprobs"], strict=True)), [
                sorted(row.items()) if len(row) > 1 else [] for row in tops
            ]
        return [(entry["token"], entry["logprob"]) for entry in found["content"]], [
            sorted((top["token"], top["logprob"]) for top in entry["top_logprobs"]) for entry in found["content"]
        ]

    def choice_of(choice):
        logprobs, tops = values_of(choice["logprobs"], choice)
        message = choice.get("message") or choice.get("delta")
        return {
            "index": choice["index"],
            "text": message["content"] if message else choice["text"],
            "finish_reason": choice["finish_reason"],
            "token_ids": choice.get("token_ids"),
            "prompt_token_ids": (body if message else choice).get("prompt_token_ids"),
            "policy_version": choice["policy_version"],
            "logprobs": logprobs,
            "tops": tops,
            "prompt_logprobs": choice.get("prompt_logprobs"),
        }

    usage = body.get("usage")
    usage = usage and {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    view = {name: body[name] for name in ("id", "model", "policy_version")}
    return view | {"usage": usage, "choices": [choice_of(choice) for choice in body["choices"]]}


def whole_of(text, kind):
    """The reply that the chunks of a stream make together."""
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert text.rstrip().endswith("data: [DONE]")
    assert {chunk["policy_version"] for chunk in chunks} == {VERSION}
    whole, parts = chunks[-1] | {"choices": []}, {}
    for chunk in chunks:
        whole |= {"prompt_token_ids": whole.get("prompt_token_ids") or chunk.get("prompt_token_ids")}
        for choice in chunk["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    for index in sorted(parts):
        full = [part for part in parts[index] if part["finish_reason"]]
        assert len(full) == 1
        whole["choices"] += full
    return whole


def ask(server, kind, body):
    """Status, draws of the engines and what is replied."""
    parts, client = server
    made, answer = asked_of(parts, lambda: client.post(PATHS[kind], json=body))
    names = ["n", "seed", *SAMPLED, "stop", "allowed_token_ids", "bad_words", "logprobs"]
    names += ["prompt_logprobs", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"]
    draws = []
    for draw in made:
        found = {name: getattr(draw.params, name) for name in names}
        structure = draw.params.structured_outputs
        kinds = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
        found["structured_outputs"] = structure and {
            kind: getattr(structure, kind) for kind in kinds if getattr(structure, kind) is not None
        }
        sizes = [each.size for each in draw.prompt.images]
        draws.append({"ids": draw.prompt.token_ids, "images": sizes, "params": found})
    draws.sort(key=lambda draw: draw["params"]["seed"])
    if answer.status_code != 200:
        return answer.status_code, draws, answer.json()
    assert answer.headers["x-policy-version"] == str(VERSION)
    whole = whole_of(answer.text, kind) if body.get("stream") else answer.json()
    return answer.status_code, draws, view_of(whole, kind)


BASE = {
    "n": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": False, "max_tokens": 3,
    "stop_token_ids": [], "logit_bias": None, "stop": [], "allowed_token_ids": None, "bad_words": [], "logprobs": 1,
    "prompt_logprobs": None, "include_stop_str_in_output": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "structured_outputs": None,
}  # fmt: skip


def check(server, name, body, effect):
    kind, base, texts, images, _ = ROUTES[name]
    status, draws, reply = ask(server, kind, body)
    if effect == REFUSED:
        assert 400 <= status < 500, reply
        assert draws == []
        return
    encode = partial(ids_of, parts=server[0])
    wanted = Wanted(
        draws=[
            {
                "ids": encode(each) if isinstance(each, str) else each,
                "images": images,
                "params": copy.deepcopy(BASE) | {"seed": 4 + 2 * place},
            }
            for place, each in enumerate(texts)
        ],
        kind=kind, name="r", num_top=1, has_ids=True, token="<{}>", usage=not base.get("stream"), ids_of=encode,
        is_streamed=False,
    )  # fmt: skip
    if "tools" in body:
        params(skip_special_tokens=False)(wanted)  # vLLM's parser hermes looks for special tokens
    effect(wanted)
    assert status == 200, reply
    assert draws == wanted.draws
    assert reply == wanted.reply()


@pytest.mark.parametrize("name", ROUTES)
def test_a_call_of_several_prompts_images_and_choices_is_answered_in_full(server, name):
    check(server, name, ROUTES[name][1], nothing)


@pytest.mark.parametrize("kind", PATHS)
def test_every_field_has_a_line(kind):
    lines = {field for one, *_, lines in ROUTES.values() if one is kind for field in lines}
    lines |= BESIDE_PARSERS.keys() if kind is ChatBody else set()
    assert lines == {field for field, is_neutral_only in fields_of(kind) if not is_neutral_only}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, route in ROUTES.items() for field in route[-1]])
def test_a_field_does_what_its_name_says_for_every_prompt_and_nothing_else(server, name, field):
    _, body, *_, lines = ROUTES[name]
    value, effect = lines[field]
    check(server, name, with_field(body, field, value), effect)


@pytest.mark.parametrize("field", BESIDE_PARSERS)
def test_what_parsers_go_by_reaches_vllm(field):
    body = ChatBody.model_validate(WITH_TOOL | {field: BESIDE_PARSERS[field]})
    assert body.for_vllm()[field] == BESIDE_PARSERS[field]


UNSERVED = [
    (name, field) for name in ("chat", "completion") for field, is_none in fields_of(ROUTES[name][0]) if is_none
]


@pytest.mark.parametrize(("name", "field"), UNSERVED)
def test_a_field_that_is_not_served_is_accepted_at_neutral_values_only(server, name, field):
    if field.startswith("messages.content."):
        return
    body = ROUTES[name][1]
    for value in (2, True, "x", ["x"], {"x": 1}):
        check(server, name, with_field(body, field, value), REFUSED)
    check(server, name, with_field(body, field, None), nothing)


def test_a_client_of_stock_servers_sends_every_value_and_reads_each_reply(server):
    """The dialect vllm, to these routes: ids as completions, images as chats."""
    parts, client = server
    shown = [{"type": "image", "image": "a"}, {"type": "text", "text": "Look."}, {"type": "image", "image": "b"}]
    images = tuple(base64.b64decode(url.partition(",")[2]) for url in (A, B))
    fields = {"messages": ({"role": "user", "content": shown},), "request_id": "r"}
    prompts = [
        Prompt(prompt_token_ids=ids, seed=seed, images=images if seed == 6 else (), **fields)
        for ids, seed in (((5, 6), 4), ((7, IMAGE), 6), ((8,), 9))
    ]
    rules = SamplingRules(
        max_tokens=6, temperature=0.75, top_p=0.5, top_k=7, repetition_penalty=1.5, stop_token_ids=(9, 11),
        banned_token_ids=(12, 13), logprobs=True,
    )  # fmt: skip
    made, replies = asked_of(parts, lambda: VllmDialect("http://s").exchange(posted_to(client), prompts, rules))
    draws = {draw.params.seed: draw for draw in made}
    assert draws.keys() == {4, 6, 9}
    sampled = BASE | {"n": 1, "max_tokens": 6, "temperature": 0.75, "top_p": 0.5, "top_k": 7, "logprobs": 0}
    sampled |= {"repetition_penalty": 1.5, "stop_token_ids": [9, 11], "logit_bias": {12: -100.0, 13: -100.0}}
    sampled |= {"skip_special_tokens": False}
    for draw in draws.values():
        assert {name: getattr(draw.params, name) for name in sampled} == sampled
        assert [each.size for each in draw.prompt.images] == ([(40, 30), (30, 40)] if draw.params.seed == 6 else [])
    rendered = ids_of("[user:<image>Look.<image>]>", parts)
    written = [(ids, response_to(seed)) for ids, seed in (((5, 6), 4), (rendered, 6), ((8,), 9))]
    assert replies == [
        Reply(
            prompt_token_ids=tuple(ids), response_token_ids=tuple(answer.ids), finish_reason=answer.reason,
            policy_version=None, logprobs=tuple(answer.logprobs),
        )
        for ids, answer in written
    ]  # fmt: skip
    unlabelled = VllmDialect("http://s").exchange(posted_to(client), prompts, replace(rules, logprobs=False))
    assert [reply.logprobs for reply in unlabelled] == [None] * 3


@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs", "model"])
def test_a_rendered_chat_has_the_ids_and_images_of_its_prompt(server, field):
    parts, client = server
    values = {"pace": "slow", "mood": "gay"}
    body = {
        "messages": CHAT["messages"],
        "tools": [TOOL, OTHER_TOOL],
        "chat_template_kwargs": values,
        "model": "second",
    }
    body = {name: body[name] for name in dict.fromkeys(("messages", field))}
    text = "[system:Be.][user:<image>Look.<image>]>"
    text = {"tools": TOOLS, "chat_template_kwargs": "gayslow"}.get(field, "") + text
    ids = ids_of(text, parts)
    reply = client.post("/v1/chat/completions/render", json=body | {"max_tokens": 9})
    hashes = reply.json()["features"]["mm_hashes"]["image"]
    assert len(set(hashes)) == 2
    placed = [{"offset": place, "length": 1} for place, token_id in enumerate(ids) if token_id == IMAGE]
    features = {"mm_placeholders": {"image": placed}, "kwargs_data": {"image": [A, B]}}
    assert reply.json() == {"token_ids": ids, "features": features | {"mm_hashes": {"image": hashes}}}
    assert client.post("/v1/chat/completions/render", json=body | {"model": "other"}).status_code == 404


def test_ids_are_detokenised_all(server):
    parts, client = server
    reply = client.post("/detokenize", json={"tokens": [5, STOP, 43], "model": "second"})
    assert (reply.status_code, reply.json()) == (200, {"prompt": parts.prompts.tokenizer.decode([5, STOP, 43])})


def test_every_name_of_the_model_is_listed(server):
    _, client = server
    reply = client.get("/v1/models")
    listed = [(each["id"], each["root"], each["max_model_len"]) for each in reply.json()["data"]]
    assert listed == [(name, str(MODEL), 512) for name in ("first", "second", str(MODEL))]
    assert reply.headers["x-policy-version"] == str(VERSION)
