"""What an engine is given and what is read from it, in vLLM's own types; no engine is started.

vLLM takes seconds to import, so each test does it by itself: collecting this file must not.
"""

import asyncio
import os
from types import SimpleNamespace

import numpy as np
import pytest

from rollmatch.server import replica
from rollmatch.server.payloads import Sampling
from rollmatch.server.prompts import EnginePrompt
from rollmatch.server.replica import EngineRequest, VllmReplica
from rollmatch.server.settings import ServerSettings

ALL = {"temperature": 0.5, "top_p": 0.75, "top_k": 9, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 0.5}
ALL |= {"frequency_penalty": -0.5, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3], "logit_bias": {4: -1.0}}


def request_with(sampling, **fields):
    prompt = EnginePrompt(token_ids=[5], images=[], expanded_len=1)
    return EngineRequest(prompt=prompt, sampling=Sampling(max_tokens=7, **sampling), **{"seed": None} | fields)


@pytest.mark.parametrize(
    ("fields", "backend", "visible", "method"),
    [
        ({}, "uni", None, "fork"),
        ({"gpus": ("6", "7")}, "uni", "7", "spawn"),
        ({"gpus": ("4", "5", "6", "7"), "tensor_parallel_size": 2}, None, "6,7", "spawn"),
    ],
)
def test_each_replica_has_gpus_and_a_seed_of_its_own(monkeypatch, fields, backend, visible, method):
    from vllm.engine import arg_utils
    from vllm.v1.engine import async_llm

    given, names = [], ("CUDA_VISIBLE_DEVICES", "VLLM_WORKER_MULTIPROC_METHOD")
    monkeypatch.setattr(
        arg_utils, "AsyncEngineArgs", lambda **each: SimpleNamespace(create_engine_config=lambda: given.append(each))
    )
    monkeypatch.setattr(async_llm, "AsyncLLM", SimpleNamespace(from_vllm_config=lambda *_, **__: None))
    monkeypatch.setattr(os, "environ", {})
    settings = {"model": "m", "dtype": "float32", "max_model_len": 64, "port": 8000, "data_parallel_size": 2}
    for arguments in ({"seed": 7}, {}):
        VllmReplica(ServerSettings(**settings, engine_arguments=arguments, **fields), index=1)
    assert [each["seed"] for each in given] == [8, 1]
    assert given[0].get("distributed_executor_backend") == backend
    assert [os.environ.get(name) for name in names] == [visible, method]


@pytest.mark.parametrize("given", [{}, ALL])
def test_what_is_not_given_is_vllms_default_but_greedy(given):
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    ours = replica._sampling_params(request_with(given, seed=11))
    kind = {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
    assert ours == SamplingParams(**{"temperature": 0.0} | given, max_tokens=7, seed=11, **kind)


def test_texts_that_end_a_response_need_it_as_text():
    stopped = replica._sampling_params(request_with({}, stop=("a",), regex="b+"))
    assert (stopped.stop, stopped.detokenize, stopped.structured_outputs.regex) == (["a"], True, "b+")


@pytest.mark.parametrize(("logprobs", "num_top", "wanted"), [(False, 2, None), (True, 0, 0), (True, 2, 2)])
def test_logprobs_are_asked_for_as_many_as_are_returned(logprobs, num_top, wanted):
    assert replica._sampling_params(request_with({"logprobs": logprobs}, num_top=num_top)).logprobs == wanted


@pytest.mark.parametrize(
    ("reason", "stop_reason", "wanted"),
    [
        ("stop", None, ("stop", 9)),
        ("stop", 8, ("stop", 8)),
        ("stop", "a", ("stop", 9)),
        ("length", None, ("length", None)),
    ],
)
def test_a_response_ends_as_vllm_says(reason, stop_reason, wanted):
    output = replica._output_of(request_output([8, 9], reason, stop_reason), num_top=0)
    assert (output.finish_reason, output.stop_token_id) == wanted
    assert (output.prompt_token_ids, output.response_token_ids, output.logprobs, output.top) == ([5], [8, 9], None, ())


@pytest.mark.parametrize(("num_top", "top"), [(0, ()), (2, (((7, -0.5), (8, -1.5)), ((9, -0.25),)))])
def test_logprobs_are_those_of_sampled_tokens_and_the_likeliest_first(num_top, top):
    from vllm.logprobs import Logprob

    places = [{8: Logprob(-1.5, rank=2), 7: Logprob(-0.5, rank=1)}, {9: Logprob(-0.25, rank=1)}]
    output = replica._output_of(request_output([8, 9], "stop", None, places), num_top=num_top)
    assert np.frombuffer(output.logprobs, "<f4").tolist() == [-1.5, -0.25]
    assert output.top == top


def request_output(token_ids, reason, stop_reason, logprobs=None):
    from vllm import CompletionOutput, RequestOutput

    answer = CompletionOutput(0, "", token_ids, None, logprobs, finish_reason=reason, stop_reason=stop_reason)
    return RequestOutput("0", None, [5], None, [answer], finished=True)


@pytest.mark.parametrize(("num_refusals", "limit_s", "is_reset"), [(3, 60.0, True), (3, -1.0, False), (0, -1.0, True)])
def test_a_cache_that_is_in_use_is_reset_once_it_is_free(monkeypatch, num_refusals, limit_s, is_reset):
    monkeypatch.setattr(replica, "_RESET_LIMIT_S", limit_s)
    asked, answers = [], iter([False] * num_refusals + [True])

    async def reset(name):
        asked.append(name)
        return next(answers) if name == "prefix" else None

    engine = SimpleNamespace(reset_prefix_cache=lambda: reset("prefix"), reset_encoder_cache=lambda: reset("encoder"))
    assert asyncio.run(VllmReplica.reset_caches(SimpleNamespace(engine=engine))) is is_reset
    assert asked == ([*["prefix"] * (num_refusals + 1), "encoder"] if is_reset else ["prefix"])
