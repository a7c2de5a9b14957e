"""A response is continued from any id, within what is left of its limit, by every backend alike."""

import dataclasses
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from conformance.doubles.digits import GREEDY, MODEL, template_of
from conformance.doubles.refusals import refused
from rollmatch.dialects.native.client import encode
from rollmatch.dialects.prompt import Prompt, Reply, SamplingRules
from rollmatch.dialects.session import DIALECTS
from rollmatch.dialects.trl.client import TrlDialect, equally_often
from rollmatch.model.template import Template, TemplateOptions
from rollmatch.rollout.hf import HfBackend
from rollmatch.rollout.server_calls import check_spoken

RULES = SamplingRules(
    max_tokens=8,
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    repetition_penalty=1.0,
    stop_token_ids=(9,),
    banned_token_ids=(),
    logprobs=False,
)


def cut_at(request, response, place, limit=None):
    changes = {"prefix_token_ids": response[:place], "request_id": f"{request.request_id}.{place}"}
    return dataclasses.replace(request, max_new_tokens=limit, **changes)


def parts_of(requests, rollouts):
    """Requests to continue from several places, with what must follow."""
    for request, rollout in zip(requests, rollouts, strict=True):
        response = rollout.response_token_ids
        for place in (0, 1, len(response) // 2, len(response) - 1):
            yield cut_at(request, response, place), response[place:]
            yield cut_at(request, response, place, limit=3), response[place : place + 3]


def check(backend, requests, rollouts):
    asked, rests = zip(*parts_of(requests, rollouts), strict=True)
    continued = backend.generate(asked, GREEDY)
    assert [rollout.response_token_ids for rollout in continued] == list(rests)
    for request, rollout in zip(asked, continued, strict=True):
        end = len(request.prefix_token_ids)
        assert rollout.prompt_token_ids[len(rollout.prompt_token_ids) - end :] == request.prefix_token_ids
        reaches_the_limit = request.max_new_tokens == len(rollout.response_token_ids)
        assert rollout.finish_reason == ("length" if reaches_the_limit else "stop")


def test_generate_continues_where_a_response_was_cut(sdpa_model, template, requests_16):
    backend = HfBackend(sdpa_model, template, batch_size=16)
    requests = requests_16[:2]
    check(backend, requests, backend.generate(requests, GREEDY))


@pytest.mark.engine
def test_the_engine_continues_where_a_response_was_cut(engine_backend, sdpa_model, requests_16, greedy_16):
    engine_backend.push(sdpa_model.named_parameters(), version=engine_backend.policy_version + 1)
    check(engine_backend, requests_16[:2], greedy_16[:2])


def prompt(ids, seed=5, images=(), **fields):
    return Prompt(request_id=str(seed), prompt_token_ids=ids, messages=(), images=images, seed=seed, **fields)


def test_native_sends_each_request_its_own_limit():
    sent = encode([prompt((1,)), prompt((2,), max_tokens=3)], RULES)
    assert "sampling" not in sent["requests"][0]
    assert sent["requests"][1]["sampling"] == sent["sampling"] | {"max_tokens": 3}


def test_trl_gets_copies_of_a_prompt_as_so_many_completions():
    bodies = []

    def post(route, body, content_type):
        bodies.append(body)
        copies = [[*ids, 40 + copy] for ids in body["prompts"] for copy in range(body["n"])]
        return SimpleNamespace(body={"prompt_ids": body["prompts"], "completion_ids": copies}, headers={})

    prompts = [prompt((1,)), prompt((2,)), prompt((1,)), prompt((3,)), prompt((1,)), prompt((2,))]
    replies = TrlDialect("http://h:1").exchange(post, prompts, RULES)
    assert [reply.prompt_token_ids for reply in replies] == [asked.prompt_token_ids for asked in prompts]
    assert [reply.response_token_ids for reply in replies] == [
        (1, 40), (2, 40), (1, 41), (3, 40), (1, 42), (2, 41),
    ]  # fmt: skip
    assert [(body["prompts"], body["n"]) for body in bodies] == [([[1]], 3), ([[2]], 2), ([[3]], 1)]
    seen = [(b"a",), (b"a", b"b"), (b"a", b"c"), (b"a", b"b"), (), (b"b", b"a")]
    assert equally_often([prompt((1,), images=images) for images in seen]) == [[[0], [2], [4], [5]], [[1, 3]]]
    assert equally_often([]) == []
    assert isinstance(replies[0], Reply)


@pytest.mark.scenario(clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#7,8"])
@pytest.mark.parametrize("dialect", ["swift", "vllm"])
def test_a_server_that_takes_chats_cannot_go_on(dialect, requests_16):
    """With images; stock vLLM takes ids for all other prompts."""
    server = SimpleNamespace(dialect=DIALECTS[dialect]("http://h:1"), base_url="http://h:1")
    pictured, template = requests_16[0], template_of()
    with_tools = replace(pictured, sample=replace(pictured.sample, tools=({"name": "search"},)))
    rendered = template.vocabulary.decode(pictured.prompt_token_ids).decode()
    again = replace(pictured.sample, messages=(("user", rendered),), has_text_prompt=True)
    continued, rendered = cut_at(pictured, (5, 6), 1), replace(pictured, sample=again)
    unlike = {"prefix-not-spoken": continued, "tools-not-spoken": with_tools, "prompt-not-spoken": rendered}
    for code, request in unlike.items():
        with refused(code, "http://h:1"):
            check_spoken(server, [request], template)
        plain = replace(request, sample=replace(request.sample, images=()))
        if dialect == "vllm":
            check_spoken(server, [plain], template)
        else:
            with refused(code, "http://h:1"):
                check_spoken(server, [plain], template)
    check_spoken(server, requests_16[:1], template)
    valued = Template(MODEL, system="", user="", options=TemplateOptions(chat={"enable_thinking": False}))
    with refused("prompt-not-spoken", "http://h:1") if dialect == "swift" else nullcontext():
        check_spoken(server, requests_16[:1], valued)
    server.dialect = TrlDialect("http://h:1")
    check_spoken(server, list(unlike.values()), template)
