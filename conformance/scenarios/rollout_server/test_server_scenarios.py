"""Scenarios of the rollout server's side with their own values, over pretending engines."""

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from conformance.doubles.request_bodies import batch
from conformance.doubles.stand_in import STOP, pool_of, refusal, requests_for_ids
from conformance.doubles.update_bodies import OPEN, full_sync
from rollmatch.server.payloads import Sampling

SWIFT_ROUTES = (
    *("/health/", "/infer/", "/get_world_size/", "/init_communicator/", "/update_flattened_params/"),
    *("/update_adapter_flattened_param/", "/reset_prefix_cache/", "/close_communicator/", "/get_engine_type/"),
)
TRL_ROUTES = (
    *("/health/", "/generate/", "/get_world_size/", "/init_communicator/", "/update_named_param/"),
    *("/reset_prefix_cache/", "/close_communicator/"),
)
GROUP = {"host": "127.0.0.1", "port": 23000, "world_size": 3}


def gather(replicas, count):
    """Each response ends only when ``count`` are being written: where a call waits for another one, none does."""
    inside, all_in = [], asyncio.Event()

    def gathering(generate):
        async def wait_and_generate(*asked):
            inside.append(asked)
            if len(inside) == count:
                all_in.set()
            async with asyncio.timeout(20):
                await all_in.wait()
            return await generate(*asked)

        return wait_and_generate

    for replica in replicas:
        replica.generate = gathering(replica.generate)


def swift(*prompts):
    requests = [{"messages": [{"role": "user", "content": f"{ids}"}]} for ids in prompts]
    return {"infer_requests": requests, "request_config": {"max_tokens": 3}}


def trl(*prompts):
    return {"prompts": [list(ids) for ids in prompts], "max_tokens": 3}


@pytest.mark.scenario(
    "rollout-server/two-callers-share-one-batch", clauses=["rollout-server/a-rollout-server-only-generates#3"]
)
@pytest.mark.parametrize(
    ("route", "body_of", "count"),
    [
        ("/native/infer/", batch, lambda reply: len(reply["responses"])),
        ("/infer/", swift, len),
        ("/generate/", trl, lambda reply: len(reply["completion_ids"])),
    ],
)
def test_two_calls_are_in_the_engine_together(start, route, body_of, count):
    parts, post, _ = start()
    gather(parts.pool.replicas, 16)
    bodies = [body_of(*[[first + i, 8] for i in range(8)]) for first in (10, 30)]
    with ThreadPoolExecutor(2) as callers:
        answered = list(callers.map(lambda body: post(route, body), bodies))
    assert [(status, count(reply)) for status, reply in answered] == [(200, 8)] * 2


@pytest.mark.scenario(
    "rollout-server/replies-are-never-swapped", clauses=["rollout-server/a-rollout-server-only-generates#4"]
)
def test_replies_are_never_swapped(start):
    _, post, _ = start(delay_s=0.002)

    def ask(first):
        prompts = [[first, 11 + i, first + i] for i in range(3)]
        returned = [post("/native/infer/", batch(*prompts))[1]["responses"] for _ in range(20)]
        return all([answer["prompt_token_ids"] for answer in responses] == prompts for responses in returned)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, (20, 43))) == [True, True]


@pytest.mark.scenario("rollout-server/health-during-a-long-generation")
def test_health_is_answered_during_a_long_generation(start):
    parts, post, client = start(delay_s=1.5)

    def wait():
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(post, "/native/infer/", batch(*([i] for i in range(10, 18))))
            while not parts.pool.num_running:
                time.sleep(0.01)
            began = time.perf_counter()
            assert client.get("/health/").status_code == 200
            return math.inf if call.done() else time.perf_counter() - began

    assert any(wait() < 1 for _ in range(3))  # other work on the machine comes and goes


@pytest.mark.scenario(
    "rollout-server/an-empty-call-generates-nothing",
    clauses=["rollout-server/a-bad-request-costs-nobody-else-anything#4"],
)
def test_an_empty_call_generates_nothing(start):
    parts, post, _ = start()
    assert post("/native/infer/", batch())[1].get("responses") == []
    assert post("/infer/", {"infer_requests": []}) == (200, [])
    assert post("/generate/", {"prompts": []})[1]["completion_ids"] == []
    assert parts.pool.num_generated_tokens == 0


@pytest.mark.scenario("rollout-server/a-caller-that-hangs-up-frees-the-engine")
def test_a_caller_that_leaves_frees_the_engine():
    async def leave(*, after_s):
        pool = pool_of(2, delay_s=5)
        call = asyncio.create_task(pool.generate_all(requests_for_ids(*range(10, 18))))
        await asyncio.sleep(after_s)
        assert pool.num_running == 8
        call.cancel()
        await asyncio.sleep(0.2)
        return pool.num_running, [replica.ended for replica in pool.replicas]

    assert asyncio.run(leave(after_s=0.05)) == (0, [4, 4])
    assert asyncio.run(leave(after_s=0)) == (0, [0, 0]), "while its first request is handed to a replica"


@pytest.mark.scenario("rollout-server/two-by-three-workers", clauses=["rollout-server/the-server-returns-its-size#1"])
def test_two_by_three_workers(start):
    _, _, client = start(tensor_parallel_size=2, data_parallel_size=3)
    assert client.get("/get_world_size/").json() == {"world_size": 6}


@pytest.mark.parametrize(("gpus", "transports"), [((), ["gloo", "direct"]), (("0", "1"), ["direct", "gloo"])])
def test_the_best_transport_of_a_server_is_named_first(start, gpus, transports):
    _, _, client = start(gpus=gpus)
    assert client.get("/native/identity/").json()["transports"] == transports


@pytest.mark.scenario(
    "weight-sync/a-wrong-shape-leaves-the-old-weights",
    "weight-sync/the-right-shape-is-accepted",
    clauses=["weight-sync/a-wrong-update-is-refused-and-named#1"],
)
def test_a_wrong_shape_leaves_the_old_weights_and_the_right_one_is_accepted(start):
    parts, post, _ = start()
    post("/native/communicator/", OPEN)
    assert post("/native/sync/", full_sync(parts))[0] == 200
    whole = full_sync(parts, sync_id="2", version=2)
    held = parts.model.tensors[parts.model.aliases["lm_head.weight"]]
    head = {"name": "lm_head.weight", "dtype": held.dtype, "shape": [held.shape[0], held.shape[1] // 2]}
    wrong = {"tensors": [*whole["tensors"], head], "buckets": [len(whole["tensors"]) + 1], "digests": None}
    assert refusal(post("/native/sync/", whole | wrong)) == (400, "tensor-shape-mismatch", "lm_head.weight")
    assert post("/native/infer/", batch([5]))[1]["responses"][0]["policy_version"] == 1
    assert post("/native/sync/", whole)[1]["policy_version"] == 2


@pytest.mark.scenario(
    "server-dialects/infer-answers-in-order-with-both-lists-of-ids",
    clauses=["server-dialects/the-swift-dialect-serves-ms-swift-trainers#1,2,3"],
)
def test_infer_answers_in_order_with_both_lists_of_ids(start):
    _, post, client = start()
    assert set(client.get("/openapi.json").json()["paths"]) >= set(SWIFT_ROUTES)
    config = {"max_tokens": 2, "return_details": True, "n": 2}
    asked = [{"prompt_token_ids": [5, 9 + i]} for i in range(3)]
    status, entries = post("/infer/", {"infer_requests": asked, "request_config": config})
    assert (status, type(entries)) == (200, list)
    bodies = [entry["response"] for entry in entries]
    returned = [(body["prompt_token_ids"], [each["token_ids"] for each in body["choices"]]) for body in bodies]
    assert returned == [([5, 9 + i], [[9 + i, STOP]] * 2) for i in range(3)]
    assert [each["index"] for each in bodies[2]["choices"]] == [0, 1]
    assert bodies[0]["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}


@pytest.mark.scenario(
    "server-dialects/two-completions-of-each-prompt",
    clauses=["server-dialects/the-trl-dialect-serves-trl-and-verifiers-trainers#1,2,3"],
)
def test_two_completions_of_each_prompt(start):
    _, post, client = start()
    assert set(client.get("/openapi.json").json()["paths"]) >= set(TRL_ROUTES)
    status, returned = post("/generate/", {"prompts": [[5, 9], [5, 10], [11]], "n": 2, "max_tokens": 2})
    assert (status, returned["prompt_ids"]) == (200, [[5, 9], [5, 10], [11]])
    assert returned["completion_ids"] == [[i, STOP] for i in (9, 9, 10, 10, 11, 11)]
    assert post("/generate/", {"prompts": ["a text"], "max_tokens": 1})[0] == 200


@pytest.mark.scenario(
    "server-dialects/an-update-before-the-communicator-is-refused",
    clauses=["server-dialects/a-success-is-reported-after-the-fact#2,3"],
)
def test_an_update_before_the_communicator_is_refused(start):
    parts, post, _ = start()
    spec = next(iter(parts.model.tensors.values())).model_dump(mode="json")
    status, returned = post("/update_named_param/", spec)
    assert (status, returned["code"]) == (409, "communicator-missing")
    assert returned["problem"]
    assert returned["remedy"]
    status, returned = post("/native/infer/", batch([5]))
    assert (status, returned["responses"][0]["policy_version"]) == (200, 0)


@pytest.mark.scenario(
    "server-dialects/a-second-communicator-is-refused",
    "server-dialects/a-communicator-can-be-opened-again-after-closing",
)
def test_a_second_communicator_is_refused_until_the_first_is_closed(start):
    parts, post, _ = start()
    spec = next(iter(parts.model.tensors.values())).model_dump(mode="json")
    assert post("/init_communicator/", GROUP)[0] == 200
    assert refusal(post("/init_communicator/", GROUP), "code") == (409, "communicator-already-open")
    assert post("/update_named_param/", spec)[0] == 200
    assert post("/close_communicator/")[0] == 200
    assert post("/init_communicator/", GROUP | {"port": 23001})[0] == 200
    assert post("/update_named_param/", spec)[0] == 200


def test_tools_of_a_chat_reach_the_template(start, monkeypatch):
    parts, post, _ = start()
    monkeypatch.setattr(parts.prompts.tokenizer, "chat_template", "{{ 'some' if tools else 'none' }}")
    for tools in ([{"type": "function", "function": {"name": "f"}}], None):
        assert post("/chat/", {"messages": [[{"role": "user", "content": "a"}]], "tools": tools})[0] == 200
    drawn = [draw for replica in parts.pool.replicas for draw in replica.generated]
    assert sorted(parts.prompts.decode(draw.prompt.token_ids) for draw in drawn) == ["none", "some"]


GIVEN = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.75, "top_k": 9, "min_p": 0.25, "repetition_penalty": 1.5}
GIVEN_TO_SWIFT = GIVEN | {"presence_penalty": 0.5, "frequency_penalty": -0.5}
RATHER = {"max_tokens": 5, "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.25}
FURTHER = {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3], "logit_bias": {4: -1.0}, "presence_penalty": 0.5}
SWIFT = {"infer_requests": [{"prompt_token_ids": [5]}]}
WHOLE = {"max_tokens": 63, "temperature": 1.0}
"""A response that fills up the model's length."""


@pytest.mark.parametrize("stop", ["ab", ["ab", "c"]])
@pytest.mark.parametrize(
    ("route", "body", "sampling"),
    [
        ("/generate/", {"prompts": [[5]]}, {"max_tokens": 16, "temperature": 1.0, "logprobs": True}),
        ("/generate/", {"prompts": [[5]], "logprobs": None, "generation_kwargs": FURTHER, **GIVEN}, GIVEN | FURTHER),
        ("/generate/", {"prompts": [[5]], "logprobs": None, "generation_kwargs": RATHER, **GIVEN}, RATHER),
        ("/infer/", SWIFT, WHOLE),
        ("/infer/", SWIFT | {"request_config": GIVEN_TO_SWIFT}, GIVEN_TO_SWIFT),
        ("/inference/v1/generate/", {"token_ids": [5]}, WHOLE),
        ("/inference/v1/generate/", {"token_ids": [5], "sampling_params": GIVEN | FURTHER}, GIVEN | FURTHER),
    ],
)
def test_a_call_is_sampled_as_it_says_and_else_by_the_defaults_of_its_dialect(start, route, body, sampling, stop):
    parts, post, _ = start()
    place = next((name for name in ("generation_kwargs", "request_config", "sampling_params") if name in body), None)
    body = body if place is None else body | {place: body[place] | {"stop": stop}}
    assert post(route, body)[0] == 200
    (draw,) = [draw for replica in parts.pool.replicas for draw in replica.generated]
    wanted = () if place is None else ("ab",) if stop == "ab" else ("ab", "c")
    further = {"seed": None, "stop": wanted, "regex": None, "num_top": 0}
    assert vars(draw.params) == Sampling(**sampling).model_dump() | further


def test_a_chat_of_trl_is_rendered_as_one_of_ms_swift_with_seeds_of_its_own(start):
    parts, post, _ = start(max_model_len=512)
    chats = [[{"role": "user", "content": text}] for text in ("one", "two")]
    assert post("/chat/", {"messages": chats, "max_tokens": 2, "generation_kwargs": {"seed": 7}})[0] == 200
    infer = {"infer_requests": [{"messages": messages} for messages in chats], "request_config": {"max_tokens": 2}}
    assert post("/infer/", infer)[0] == 200
    drawn = [draw for replica in parts.pool.replicas for draw in replica.generated]
    prompts = sorted(tuple(draw.prompt.token_ids) for draw in drawn)
    assert (prompts[0], prompts[2]) == (prompts[1], prompts[3])
    assert len(set(prompts)) == 2
    assert {draw.params.seed for draw in drawn} >= {7, 8}
