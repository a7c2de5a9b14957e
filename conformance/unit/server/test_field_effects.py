"""Every field of a body that generates does what its name says, for every response and for nothing else.

A field without a line fails, and so does one with a line that the body no longer has. Values are never neutral ones,
calls have several prompts, images and responses, and engines write every response otherwise
(``doubles.distinct_responses``).
"""

import copy
import typing
from functools import partial
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from conformance.doubles.digits import MODEL
from conformance.doubles.distinct_responses import DistinctReplica, asked_of, ids_of, prompt_rows, response_to, serving
from conformance.doubles.field_effects import SAMPLED, fields_of, given, with_field
from conformance.doubles.request_bodies import IMAGE, picture
from conformance.doubles.stand_in import STOP, make_parts
from rollmatch.dialects.openai.bodies import TokenBody
from rollmatch.dialects.swift.bodies import SwiftBatch
from rollmatch.dialects.trl.bodies import TrlBatch, TrlChats
from rollmatch.server.payloads import InferBatch, Sampling

VERSION, NAME = 3, "step seven"
PICTURES = {(40, 30): picture(40, 30), (30, 40): picture(30, 40), (50, 30): picture(50, 30)}
A, B, C = PICTURES.values()
DEFAULTS = {name: field.default for name, field in Sampling.model_fields.items() if not field.is_required()}
DEFAULTS |= {"stop": (), "regex": None, "num_top": 0, "num_prompt_top": None, "logit_bias": {}}
REFUSED = "refused"
"""Any other value than a neutral one."""


def each(**changes):
    """Effect: so every response of the call is sampled."""

    def change(wanted):
        for draw in wanted.draws:
            draw |= changes

    return change


def last(**changes):
    """Effect: so the responses to the last prompt are made."""

    def change(wanted):
        ids = wanted.draws[-1]["ids"]
        for draw in wanted.draws:
            draw |= changes if draw["ids"] is ids else {}

    return change


def replies(**changes):
    """Effect: the reply alone is another one."""
    return lambda wanted: vars(wanted).update(changes)


def nothing(_):
    """No effect."""


def both(*effects):
    def change(wanted):
        for effect in effects:
            effect(wanted)

    return change


def reseeded(first, count=2):
    """Effect: responses sample from seeds that count up over all prompts."""

    def change(wanted):
        prompts = [draw for place, draw in enumerate(wanted.draws) if place % wanted.n == 0]
        wanted.n = count
        wanted.draws = [
            draw | {"seed": None if first is None else first + item * count + copy}
            for item, draw in enumerate(prompts)
            for copy in range(count)
        ]

    return change


def prompt(ids, images=(), **fields):
    return {"ids": list(ids), "images": list(images)} | fields


def sampled(place, *, without=()):
    """Lines for the sampling values below ``place``."""
    names = [name for name in SAMPLED if name not in without]
    return {f"{place}{name}": (SAMPLED[name], each(**{name: given(name, SAMPLED[name])})) for name in names}


class Route(typing.NamedTuple):
    path: str
    kind: type[BaseModel]
    body: dict
    prompts: list
    """What the engines get."""
    rules: dict
    """How they sample it."""
    reply: object
    """(wanted, server) -> the reply."""
    lines: dict
    """Field -> a value, and its effect or ``REFUSED``; a field below a list is set in its last entry."""


def native_reply(wanted, server):
    responses = [
        {
            "request_id": name,
            "prompt_token_ids": draw["ids"],
            "response_token_ids": one.ids,
            "finish_reason": one.reason,
            "stop_token_id": one.stop_id,
            "policy_version": VERSION,
            "policy_versions": [[VERSION, len(one.ids)]],
            "logprobs": one.logprobs if draw["logprobs"] else None,
        }
        for name, draw, one in zip(wanted.names, wanted.draws, wanted.written(), strict=True)
    ]
    return {"instance": server.instance, "policy_version": VERSION, "responses": responses}


def swift_reply(wanted, server):
    entries = []
    for place, name in enumerate(wanted.names):
        draws, written = wanted.of(place)
        num_prompt, num_written = len(draws[0]["ids"]), sum(len(one.ids) for one in written)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": server.prompts.decode(one.ids), "tool_calls": None},
                "finish_reason": one.reason,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token_id}", "logprob": value}
                        for token_id, value in zip(one.ids, one.logprobs, strict=True)
                    ]
                }
                if draw["logprobs"]
                else None,
                "token_ids": one.ids if wanted.details else None,
            }
            for index, (draw, one) in enumerate(zip(draws, written, strict=True))
        ]
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_written}
        response = {
            "model": str(MODEL), "choices": choices, "usage": usage | {"total_tokens": num_prompt + num_written},
            "id": name or "", "object": "chat.completion",
            "prompt_token_ids": draws[0]["ids"] if wanted.details else None,
        }  # fmt: skip
        entries.append(
            {
                "response": response, "messages": None, "response_token_ids": [], "response_loss_mask": [],
                "rollout_infos": {"policy_version": VERSION, "uuid": name}, "rollout_logprobs": [],
            }
        )  # fmt: skip
    return entries


def trl_reply(wanted, _):
    rows = [one.likeliest(draw["num_top"]) for draw, one in zip(wanted.draws, wanted.written(), strict=True)]
    has_values = wanted.draws[0]["logprobs"]
    return {
        "prompt_ids": [draw["ids"] for draw in wanted.draws[:: wanted.n]],
        "completion_ids": [one.ids for one in wanted.written()],
        "logprobs": [[[value for _, value in place] for place in row] for row in rows] if has_values else None,
        "logprob_token_ids": [[[name for name, _ in place] for place in row] for row in rows] if has_values else None,
    }


def entry_of(token_id, value):
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": value, "bytes": None}


def token_reply(wanted, _):
    ids, written, num_prompt = wanted.draws[0]["ids"], wanted.written(), len(wanted.draws[0]["ids"])
    num_top, num_written = wanted.draws[0]["num_top"], sum(len(one.ids) for one in written)
    choices = [
        {
            "index": index,
            "token_ids": one.ids,
            "finish_reason": one.reason,
            "stop_reason": one.stop_id,
            "policy_version": VERSION,
            "weight_versions": [{"start": 0, "end": len(one.ids), "version": NAME}],
            "logprobs": {
                "content": [
                    entry_of(token_id, value)
                    | {"top_logprobs": [entry_of(*pair) for pair in likeliest] if num_top else []}
                    for token_id, value, likeliest in zip(one.ids, one.logprobs, one.likeliest(num_top), strict=True)
                ]
            }
            if wanted.draws[0]["logprobs"]
            else None,
        }
        for index, one in enumerate(written)
    ]
    of_prompt = [
        {str(token_id): vars(one) for token_id, one in row.items()} or None for row in prompt_rows(ids)
    ]  # fmt: skip
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_written}
    reply = {
        "request_id": wanted.names[0], "model": str(MODEL), "choices": choices, "policy_version": VERSION,
        "usage": usage | {"total_tokens": num_prompt + num_written},
        "prompt_logprobs": None if wanted.draws[0]["num_prompt_top"] is None else of_prompt,
    }  # fmt: skip
    if not wanted.details:
        return reply
    runs = [{"offset": place, "length": 1} for place, token_id in enumerate(ids) if token_id == IMAGE]
    return reply | {"prompt_token_ids": ids, "mm_placeholders": {"image": runs}}


TWO = [prompt([5, IMAGE, 6, IMAGE, 9], [(40, 30), (30, 40)]), prompt([8, IMAGE, 10], [(50, 30)])]
USER = {"role": "user", "content": "Look."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER_TOOL = {"type": "function", "function": {"name": "g", "parameters": {"type": "null"}}}
FEATURES = {
    "mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
    "kwargs_data": {"image": [f"data:image/png;base64,{B}"]},
}  # fmt: skip


def text(value):
    """Effect: the last prompt is this text, where ``<image>`` stands for the placeholder."""
    return lambda wanted: last(ids=wanted.ids_of(value))(wanted)


NATIVE = {
    "requests": [
        {"request_id": "b", "prompt_token_ids": TWO[0]["ids"], "images": [1, 0], "seed": 4},
        {"request_id": "a", "prompt_token_ids": TWO[1]["ids"], "images": [2], "seed": 6},
    ],
    "sampling": {"max_tokens": 3, "logprobs": True},
    "images": [B, A, C],
}
OWN = copy.deepcopy(NATIVE)
OWN["requests"][1]["sampling"] = {"max_tokens": 4}
RULES = DEFAULTS | {"max_tokens": 3, "logprobs": True}
SEEDED = [draw | {"seed": seed} for draw, seed in zip(TWO, (4, 6), strict=True)]
NATIVE_LINES = sampled("sampling.") | {
    "sampling.logprobs": (False, each(logprobs=False)),
    "sampling": ({"max_tokens": 9}, each(max_tokens=9, logprobs=False)),
    "requests": (NATIVE["requests"][1:], lambda wanted: (wanted.draws.pop(0), wanted.names.pop(0))),
    "requests.request_id": ("c", lambda wanted: wanted.names.__setitem__(1, "c")),
    "requests.prompt_token_ids": ([9, IMAGE], last(ids=[9, IMAGE])),
    "requests.messages": ([USER], REFUSED),  # beside ids
    "requests.images": ([0], last(images=[(30, 40)])),
    "requests.seed": (11, last(seed=11)),
    "requests.sampling": ({"max_tokens": 9}, last(max_tokens=9, logprobs=False)),
    "images": ([A, B, C], lambda wanted: wanted.draws[0]["images"].reverse()),
}
OWN_LINES = {
    f"requests.sampling.{name}": (value, last(**{name: given(name, value)}))
    for name, value in (SAMPLED | {"logprobs": True}).items()
}
SPOKEN = {
    "requests": [
        {"request_id": "b", "messages": [USER], "seed": 4},
        {"request_id": "a", "messages": [{"role": "system", "content": "Be."}, USER], "seed": 6},
    ],
    "sampling": {"max_tokens": 3, "logprobs": True},
}
SPOKEN_LINES = {
    "requests.messages": (
        [USER, {"role": "assistant", "content": "Hm."}, USER | {"content": "No."}],
        text("[user:Look.][assistant:Hm.][user:No.]>"),
    )
}
SWIFT = {
    "infer_requests": [
        {"prompt_token_ids": TWO[0]["ids"], "images": [A, {"bytes": B}], "uuid": "b"},
        {"messages": [USER | {"content": "<image>Look."}], "images": [{"bytes": C, "path": None}], "uuid": "a"},
    ],
    "request_config": {"max_tokens": 3, "n": 2, "seed": 4, "return_details": True, "logprobs": True},
}
SWIFT_LINES = sampled("request_config.", without=("min_tokens", "ignore_eos", "stop_token_ids", "logit_bias")) | {
    "infer_requests": (
        SWIFT["infer_requests"][1:],
        both(lambda wanted: (wanted.draws.__delitem__(slice(2)), wanted.names.pop(0)), reseeded(4)),
    ),
    "infer_requests.messages": ([USER | {"content": "No<image>"}], text("[user:No<image>]>")),
    "infer_requests.prompt_token_ids": ([9, IMAGE], REFUSED),  # beside messages
    "infer_requests.images": ([A], last(images=[(40, 30)])),
    "infer_requests.images.bytes": (A, last(images=[(40, 30)])),
    "infer_requests.images.path": ("/etc/hostname", nothing),  # ms-swift takes bytes first
    "infer_requests.uuid": ("c", lambda wanted: wanted.names.__setitem__(1, "c")),
    "infer_requests.data_dict": ({"a": 1}, nothing),
    "infer_requests.add_eos": (True, nothing),
    "request_config": ({"max_tokens": 3}, both(reseeded(None, 1), each(logprobs=False), replies(details=False))),
    "request_config.seed": (11, reseeded(11)),
    "request_config.stop": (["END", "<|im_end|>", "DONE"], each(stop=("END", "DONE"), stop_token_ids=(STOP,))),
    "request_config.n": (3, reseeded(4, 3)),
    "request_config.logprobs": (False, each(logprobs=False)),
    "request_config.return_details": (False, replies(details=False)),
    "use_tqdm": (True, nothing),
}
TRL = {
    "prompts": [draw["ids"] for draw in TWO], "images": [[A, B], C], "n": 2, "max_tokens": 3, "logprobs": 2,
    "generation_kwargs": {"seed": 4},
}  # fmt: skip
TRL_COMMON = (
    sampled("generation_kwargs.")
    | {
        name: (SAMPLED[name], each(**{name: SAMPLED[name]}))
        for name in ("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens")
    }
    | {
        "n": (3, reseeded(4, 3)),
        "logprobs": (None, each(logprobs=False, num_top=0)),
        "structured_outputs_regex": ("a+", each(regex="a+")),
        "generation_kwargs": ({}, reseeded(None)),
        "generation_kwargs.seed": (11, reseeded(11)),
        "generation_kwargs.stop": (["END", "DONE"], each(stop=("END", "DONE"))),
    }
)
TRL_LINES = TRL_COMMON | {
    "prompts": ([TWO[0]["ids"], [9, IMAGE]], last(ids=[9, IMAGE])),
    "images": ([[A, B], [B]], last(images=[(30, 40)])),
}
CHATS = TRL | {
    "messages": [
        [USER],
        [{"role": "system", "content": "Be."}, USER | {"content": [{"type": "text", "text": "Look."}]}],
    ]
}
del CHATS["prompts"], CHATS["images"]
CHAT_TEXTS = ["[user:Look.]>", "[system:Be.][user:Look.]>"]


def every_text(before):
    """Effect: ``before`` stands before all prompts."""

    def change(wanted):
        for place, chat in enumerate(CHAT_TEXTS):
            for draw in wanted.of(place)[0]:
                draw["ids"] = wanted.ids_of(before + chat)

    return change


CHAT_LINES = TRL_COMMON | {
    "messages": (
        [[USER], [USER, {"role": "assistant", "tool_calls": [CALL]}]],
        lambda wanted: text('[user:Look.][assistant:c.f{"a": 1}]>')(wanted),
    ),
    "tools": (
        [TOOL, OTHER_TOOL],
        every_text('f{"type": "object"}g{"type": "null"}'),
    ),
    "chat_template_kwargs": ({"pace": "slow", "mood": "gay"}, every_text("gayslow")),
}
TOKENS = {
    "token_ids": TWO[0]["ids"], "content_parts": [{"type": "image_url", "url": f"data:image/png;base64,{each}"}
    for each in (A, B)], "request_id": "b", "return_token_ids": True,
    "sampling_params": {"n": 2, "seed": 4, "max_tokens": 3, "logprobs": 2},
}  # fmt: skip
WITH_FEATURES = TOKENS | {"content_parts": TOKENS["content_parts"][:1], "features": FEATURES}
TOKEN_LINES = sampled("sampling_params.") | {
    "token_ids": ([IMAGE, 7, IMAGE], last(ids=[IMAGE, 7, IMAGE])),
    "model": (str(MODEL), nothing),
    "request_id": ("c", lambda wanted: wanted.names.__setitem__(0, "c")),
    "content_parts": (TOKENS["content_parts"][::-1], last(images=[(30, 40), (40, 30)])),
    "content_parts.type": ("video_url", REFUSED),
    "content_parts.url": (f"data:image/png;base64,{C}", last(images=[(40, 30), (50, 30)])),
    "content_parts.uuid": ("u", nothing),
    "return_token_ids": (False, replies(details=False)),
    "cache_salt": ("s", nothing),
    "priority": (1, REFUSED),
    "output_mode": ("text", REFUSED),
    "sampling_params": (
        {"max_tokens": 2},
        both(reseeded(None, 1), each(max_tokens=2, logprobs=False, num_top=0)),
    ),
    "sampling_params.n": (3, reseeded(4, 3)),
    "sampling_params.seed": (11, reseeded(11)),
    "sampling_params.stop": (["END", "DONE"], each(stop=("END", "DONE"))),
    "sampling_params.logprobs": (None, each(logprobs=False, num_top=0)),
    "sampling_params.prompt_logprobs": (1, each(num_prompt_top=1)),
    "sampling_params.structured_outputs": ({"regex": "a+"}, each(regex="a+")),
    "sampling_params.structured_outputs.regex": ("b+", each(regex="b+")),
    **{
        f"sampling_params.{name}": (value, nothing)
        for name, value in {
            "skip_special_tokens": False, "spaces_between_special_tokens": False, "detokenize": False,
            "include_stop_str_in_output": True, "routed_experts_prompt_start": 1, "output_kind": 2,
        }.items()
    },
}  # fmt: skip
FEATURE_LINES = {
    "features": (None, REFUSED),  # an image is missing then
    "features.mm_hashes": ({"image": ["y"]}, nothing),
    "features.mm_placeholders": ({"image": [{"offset": 3, "length": 9}]}, nothing),
    "features.kwargs_data": ({"image": [f"data:image/png;base64,{C}"]}, last(images=[(40, 30), (50, 30)])),
}
ROUTES = {
    "native": Route("/native/infer/", InferBatch, NATIVE, SEEDED, RULES, native_reply, NATIVE_LINES),
    "native, sampling of a request": Route(
        "/native/infer/", InferBatch, OWN,
        [SEEDED[0], SEEDED[1] | {"max_tokens": 4, "logprobs": False}], RULES, native_reply, OWN_LINES,
    ),
    "native, chats": Route(
        "/native/infer/", InferBatch, SPOKEN,
        [prompt(chat, seed=seed) for chat, seed in zip(CHAT_TEXTS, (4, 6), strict=True)], RULES, native_reply,
        SPOKEN_LINES,
    ),
    "swift": Route(
        "/infer/", SwiftBatch, SWIFT, [TWO[0], prompt("[user:<image>Look.]>", [(50, 30)])],
        RULES | {"temperature": 1.0}, swift_reply, SWIFT_LINES,
    ),
    "trl": Route(
        "/generate/", TrlBatch, TRL, TWO, RULES | {"temperature": 1.0, "num_top": 2}, trl_reply, TRL_LINES
    ),
    "trl, chats": Route(
        "/chat/", TrlChats, CHATS, [prompt(chat) for chat in CHAT_TEXTS], RULES | {"temperature": 1.0, "num_top": 2},
        trl_reply, CHAT_LINES,
    ),
    "tokens": Route(
        "/inference/v1/generate/", TokenBody, TOKENS, TWO[:1], RULES | {"temperature": 1.0, "num_top": 2}, token_reply,
        TOKEN_LINES,
    ),
    "tokens, features": Route(
        "/inference/v1/generate/", TokenBody, WITH_FEATURES, TWO[:1], RULES | {"temperature": 1.0, "num_top": 2},
        token_reply, FEATURE_LINES,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with serving(make_parts(kind=DistinctReplica, drain_s=0.01, max_model_len=512), version=VERSION) as made:
        assert made[1].post("/update_weight_version/", json={"new_version": NAME}).status_code == 200
        yield made


class Wanted(SimpleNamespace):
    """What a call leads to: draws of the engines, and what its reply is made of."""

    def written(self):
        return [response_to(draw["seed"] or 0) for draw in self.draws]

    def of(self, place):
        """Draws for the prompt of a place, and what is written to it."""
        some = slice(place * self.n, (place + 1) * self.n)
        return self.draws[some], self.written()[some]


def wanted_of(route, parts):
    is_seeded = "seed" in route.prompts[0]
    encode = partial(ids_of, parts=parts)
    prompts = [draw | {"ids": encode("".join(draw["ids"])) if isinstance(draw["ids"][0], str) else draw["ids"]}
               for draw in copy.deepcopy(route.prompts)]  # fmt: skip
    draws = [draw for draw in prompts for _ in range(1 if is_seeded else 2)]
    draws = [copy.deepcopy(route.rules) | {"seed": 4 + place} | draw for place, draw in enumerate(draws)]
    return Wanted(draws=draws, names=["b", "a"], n=1 if is_seeded else 2, details=True, ids_of=encode)


def ask(server, route, body):
    """Status, draws of the engines and reply of a call."""
    parts, client = server
    made, answer = asked_of(parts, lambda: client.post(route.path, json=body))
    draws = [
        prompt(one.prompt.token_ids, [image.size for image in one.prompt.images], **vars(one.params)) for one in made
    ]
    reply = answer.json()
    if isinstance(reply, dict) and "created" in reply:
        assert reply.pop("created") > 1.7e9
    if answer.status_code == 200 and route.kind is not InferBatch:
        assert answer.headers["x-policy-version"] == str(VERSION)
    return answer.status_code, draws, reply


def check(server, route, body, effect):
    status, draws, reply = ask(server, route, body)
    if effect == REFUSED:
        assert 400 <= status < 500, reply
        assert draws == []
        assert "code" in reply
        return
    wanted = wanted_of(route, server[0])
    effect(wanted)
    assert status == 200, reply
    assert draws == wanted.draws
    assert reply == route.reply(wanted, server[0])


@pytest.mark.parametrize("name", ROUTES)
def test_a_call_of_several_prompts_images_and_responses_is_answered_in_full(server, name):
    check(server, ROUTES[name], ROUTES[name].body, nothing)


@pytest.mark.parametrize("path", sorted({route.path for route in ROUTES.values()}))
def test_every_field_has_a_line(path):
    routes = [route for route in ROUTES.values() if route.path == path]
    fields = dict(fields_of(routes[0].kind))
    lines = {name for route in routes for name in route.lines}
    assert lines == {name for name, is_neutral_only in fields.items() if not is_neutral_only}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, route in ROUTES.items() for field in route.lines])
def test_a_field_does_what_its_name_says_for_every_response_and_nothing_else(server, name, field):
    route = ROUTES[name]
    value, effect = route.lines[field]
    check(server, route, with_field(route.body, field, value), effect)


BARE = {
    "native": (
        {"requests": [{"request_id": "b", "prompt_token_ids": [5]}], "sampling": {"max_tokens": 7}},
        each(seed=None, max_tokens=7, logprobs=False),
    ),
    "swift": (
        {"infer_requests": [{"prompt_token_ids": [5]}]},
        both(reseeded(None, 1), each(max_tokens=511, logprobs=False), replies(details=False, names=[None])),
    ),
    "trl": ({"prompts": [[5]]}, both(reseeded(None, 1), each(max_tokens=16, num_top=0))),
    "trl, chats": ({"messages": [[USER]]}, both(reseeded(None, 1), each(max_tokens=16, num_top=0))),
    "tokens": (
        {"token_ids": [5], "request_id": "b"},
        both(reseeded(None, 1), each(max_tokens=511, logprobs=False, num_top=0), replies(details=False)),
    ),
}
"""Bodies that say nothing more than they must."""


@pytest.mark.parametrize("name", BARE)
def test_what_is_left_out_is_as_the_dialects_own_servers_have_it(server, name):
    body, effect = BARE[name]

    def alone(wanted):
        del wanted.draws[wanted.n :], wanted.names[1:]
        if "messages" not in body:
            each(ids=[5], images=[])(wanted)
        effect(wanted)

    check(server, ROUTES[name], body, alone)


UNSERVED = [
    (name, field)
    for name, route in ROUTES.items()
    for field, is_neutral_only in fields_of(route.kind)
    if is_neutral_only and field.startswith("features.") == name.endswith("features")
]


@pytest.mark.parametrize(("name", "field"), UNSERVED)
def test_a_field_that_is_not_served_is_accepted_at_neutral_values_only(server, name, field):
    route = ROUTES[name]
    for value in (2, True, "x", ["x"], {"x": 1}):
        check(server, route, with_field(route.body, field, value), REFUSED)
    for value in (None, False, [], {}):
        check(server, route, with_field(route.body, field, value), nothing)
