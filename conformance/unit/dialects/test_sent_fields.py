"""What a client sends of prompts and rules is what engines get, and what they write is what it reads, in each dialect.

Its calls go to our own server, whose fields ``unit/server/test_field_effects.py`` holds, over engines that write every
response otherwise. No value is neutral, and no two prompts have one in common.
"""

import base64
from dataclasses import fields, replace

import pytest

from conformance.doubles.distinct_responses import DistinctReplica, asked_of, ids_of, posted_to, response_to, serving
from conformance.doubles.request_bodies import IMAGE, picture
from conformance.doubles.stand_in import STOP, make_parts
from rollmatch.dialects.native.client import NativeDialect
from rollmatch.dialects.prompt import Prompt, Reply, SamplingRules
from rollmatch.dialects.swift.client import SwiftDialect
from rollmatch.dialects.trl.client import TrlDialect

VERSION = 3
A, B, C = (base64.b64decode(picture(*size)) for size in ((40, 30), (30, 40), (50, 30)))
RULES = SamplingRules(
    max_tokens=6, temperature=0.75, top_p=0.5, top_k=7, repetition_penalty=1.5, stop_token_ids=(9, STOP),
    banned_token_ids=(12, 13), logprobs=True, stop_texts=("END", "DONE"),
)  # fmt: skip
SHAPED = {"temperature": 0.75, "top_p": 0.5, "top_k": 7, "repetition_penalty": 1.5, "min_p": 0.0, "logprobs": True}
SHAPED |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": False, "regex": None}
SHAPED |= {"num_top": 0, "num_prompt_top": None, "max_tokens": 6, "stop": (), "stop_token_ids": (), "logit_bias": {}}
BY_ID, BIASED = {"stop_token_ids": (9, STOP)}, {"logit_bias": {12: -100.0, 13: -100.0}}


def chat(*parts):
    shown = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": "x"} for part in parts
    ]
    return ({"role": "system", "content": "Be."}, {"role": "user", "content": shown})


PROMPTS = [
    Prompt(
        request_id="0.0.b", prompt_token_ids=(5, IMAGE, 6, IMAGE, 9), images=(A, B), seed=4,
        messages=chat(A, "Look.", B), template_values={"mark": "m"},  # a server of chats alone is refused beside them
    ),
    Prompt(request_id="0.0.a", prompt_token_ids=(8, 10), images=(), seed=8, max_tokens=5, messages=chat("No.")),
    Prompt(request_id="0.0.c", prompt_token_ids=(7, IMAGE), images=(C,), seed=7, messages=chat("And?", C)),
]  # fmt: skip
TEXTS = ["[system:Be.][user:<image>Look.<image>]>", "[system:Be.][user:No.]>", "[system:Be.][user:And?<image>]>"]
SIZES = [[(40, 30), (30, 40)], [], [(50, 30)]]
OF_DIALECT = {
    NativeDialect: ([4, 8, 7], SHAPED | BY_ID | BIASED),
    SwiftDialect: ([4, 5, 6], SHAPED | {"stop": ("END", "DONE")}),
    TrlDialect: ([4, 5, 6], SHAPED | BY_ID),
}
"""Seeds of the responses, and how they are sampled; the later two have one seed for a call, and cannot ban ids."""


@pytest.fixture(scope="module")
def server():
    with serving(make_parts(kind=DistinctReplica, drain_s=0.01, max_model_len=512), version=VERSION) as made:
        yield made


def exchanged(server, dialect, prompts, rules=RULES):
    """Draws of the engines by their seeds, and replies."""
    parts, client = server
    draws, replies = asked_of(parts, lambda: dialect("http://s").exchange(posted_to(client), prompts, rules))
    return {draw.params.seed: draw for draw in draws}, replies


def reply_of(dialect, ids, seed):
    answer = response_to(seed)
    runs = {"policy_versions": ((VERSION, len(answer.ids)),)} if dialect is NativeDialect else {}
    return Reply(
        prompt_token_ids=tuple(ids), response_token_ids=tuple(answer.ids), finish_reason=answer.reason,
        policy_version=VERSION, logprobs=tuple(answer.logprobs), **runs,
    )  # fmt: skip


@pytest.mark.parametrize("dialect", OF_DIALECT)
def test_every_value_of_prompts_and_rules_reaches_the_engine_and_every_response_its_prompt(server, dialect):
    seeds, rules = OF_DIALECT[dialect]
    prompts = [ids_of(text, server[0]) for text in TEXTS]
    if dialect is not SwiftDialect:
        prompts = [list(prompt.prompt_token_ids) for prompt in PROMPTS]
    draws, replies = exchanged(server, dialect, PROMPTS)
    assert draws.keys() == set(seeds)
    for place, seed in enumerate(seeds):
        draw, own = draws[seed], {"seed": seed}
        if dialect is NativeDialect and PROMPTS[place].max_tokens:
            own |= {"max_tokens": PROMPTS[place].max_tokens}
        assert (draw.prompt.token_ids, [each.size for each in draw.prompt.images]) == (prompts[place], SIZES[place])
        assert vars(draw.params) == rules | own
    assert replies == [reply_of(dialect, *pair) for pair in zip(prompts, seeds, strict=True)]


@pytest.mark.parametrize("dialect", OF_DIALECT)
def test_logprobs_come_where_they_are_asked_for(server, dialect):
    draws, replies = exchanged(server, dialect, PROMPTS, replace(RULES, logprobs=False))
    assert [draw.params.logprobs for draw in draws.values()] == [False] * 3
    assert [reply.logprobs for reply in replies] == [None] * 3


def test_copies_of_a_prompt_are_choices_of_one_with_seeds_of_their_own(server):
    """trl: each call has the seed of its first prompt."""
    first, second, third = PROMPTS
    draws, replies = exchanged(server, TrlDialect, [second, first, third, first])
    assert {seed: draw.prompt.token_ids[0] for seed, draw in draws.items()} == {8: 8, 9: 7, 4: 5, 5: 5}
    expected = [(second, 8), (first, 4), (third, 9), (first, 5)]
    assert replies == [reply_of(TrlDialect, prompt.prompt_token_ids, seed) for prompt, seed in expected]


def test_no_field_of_prompts_or_rules_is_neutral_here():
    """A new one gets a value above."""
    assert {each.name for each in fields(Prompt)} == {
        "request_id", "prompt_token_ids", "messages", "images", "seed", "max_tokens", "template_values"
    }  # fmt: skip
    assert {each.name for each in fields(SamplingRules)} == {
        "max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "stop_token_ids", "banned_token_ids",
        "logprobs", "stop_texts",
    }  # fmt: skip
