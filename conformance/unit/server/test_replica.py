"""What an engine is given and what is read from it, in vLLM's own types; no engine is started.

vLLM takes seconds to import, so each test does it by itself: collecting this file must not.
"""

import asyncio
import os
from types import SimpleNamespace

import numpy as np
import pytest

from rollmatch.server.payloads import Sampling
from rollmatch.server.prompts import EnginePrompt, GenerateRequest
from rollmatch.server.replica import VllmReplica
from rollmatch.server.settings import ServerSettings

ALL = {"temperature": 0.5, "top_p": 0.75, "top_k": 9, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 0.5}
ALL |= {"frequency_penalty": -0.5, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3], "logit_bias": {4: -1.0}}


PROMPT = EnginePrompt(token_ids=[5], images=[], expanded_len=1)


def params_of(sampling, *, seed=None, **fields):
    return VllmReplica.params_of(GenerateRequest(sampling=Sampling(max_tokens=7, **sampling), **fields), seed=seed)


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

    kind = {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
    expected = SamplingParams(**{"temperature": 0.0} | given, max_tokens=7, seed=11, **kind)
    assert params_of(given, seed=11) == expected


def test_texts_that_end_a_response_need_it_as_text():
    stopped = params_of({}, stop=("a",), regex="b+")
    assert (stopped.stop, stopped.detokenize, stopped.structured_outputs.regex) == (["a"], True, "b+")


@pytest.mark.parametrize(("logprobs", "num_top", "wanted"), [(False, 2, None), (True, 0, 0), (True, 2, 2)])
def test_logprobs_are_asked_for_as_many_as_are_returned(logprobs, num_top, wanted):
    assert params_of({"logprobs": logprobs}, num_top=num_top).logprobs == wanted


class SilentEngine:
    """What a replica uses of vLLM's ``AsyncLLM``: answers of the test in vLLM's own types; nothing is generated."""

    def __init__(self):
        self.output, self.num_refusals, self.resets = None, 0, []

    async def generate(self, prompt, params, request_id):
        assert prompt == {"prompt_token_ids": [5]}
        yield self.output

    async def reset_prefix_cache(self):
        self.resets.append("prefix")
        return self.resets.count("prefix") > self.num_refusals

    async def reset_encoder_cache(self):
        self.resets.append("encoder")


@pytest.fixture
def silent(monkeypatch):
    """A replica over such an engine."""
    from vllm.engine import arg_utils
    from vllm.v1.engine import async_llm

    arguments = SimpleNamespace(create_engine_config=dict)
    monkeypatch.setattr(arg_utils, "AsyncEngineArgs", lambda **_: arguments)
    monkeypatch.setattr(async_llm, "AsyncLLM", SimpleNamespace(from_vllm_config=lambda *_, **__: SilentEngine()))
    monkeypatch.setattr(os, "environ", {})
    return VllmReplica(ServerSettings(model="m", dtype="float32", max_model_len=64, port=8000), index=0)


def generated(replica, params, token_ids, reason, stop_reason, logprobs=None):
    from vllm import CompletionOutput, RequestOutput

    answer = CompletionOutput(0, "", token_ids, None, logprobs, finish_reason=reason, stop_reason=stop_reason)
    replica.engine.output = RequestOutput("0", None, [5], None, [answer], finished=True)
    return asyncio.run(replica.generate(PROMPT, params, "0"))


@pytest.mark.parametrize(
    ("reason", "stop_reason", "wanted"),
    [
        ("stop", None, ("stop", 9)),
        ("stop", 8, ("stop", 8)),
        ("stop", "a", ("stop", 9)),
        ("length", None, ("length", None)),
    ],
)
def test_a_response_ends_as_vllm_says(silent, reason, stop_reason, wanted):
    output = generated(silent, params_of({}), [8, 9], reason, stop_reason)
    assert (output.finish_reason, output.stop_token_id) == wanted
    assert (output.prompt_token_ids, output.response_token_ids, output.logprobs, output.top) == ([5], [8, 9], None, ())


def flat(*places):
    """Log-probabilities as vLLM returns them to us: token id -> (log-probability, rank) at each place."""
    from vllm.logprobs import FlatLogprobs, Logprob

    found = FlatLogprobs()
    found.extend({name: Logprob(value, rank=rank) for name, (value, rank) in place.items()} for place in places)
    return found


@pytest.mark.parametrize(
    ("num_top", "likeliest"), [(0, [[(8, -1.5)], [(9, -0.25)]]), (2, [[(7, -0.5), (8, -1.5)], [(9, -0.25)]])]
)
def test_logprobs_are_those_of_sampled_tokens_and_the_likeliest_first(silent, num_top, likeliest):
    places = flat({8: (-1.5, 2), 7: (-0.5, 1)}, {9: (-0.25, 1)})
    output = generated(silent, params_of({"logprobs": True}, num_top=num_top), [8, 9], "stop", None, places)
    assert np.frombuffer(output.logprobs, "<f4").tolist() == [-1.5, -0.25]
    assert list(output.likeliest()) == likeliest


@pytest.mark.scenario(clauses=["server-dialects/the-trl-dialect-serves-trl-and-verifiers-trainers#10"])
def test_a_token_that_is_cut_off_has_a_log_probability_that_json_can_hold(silent):
    """As with top_k 1 and two log-probabilities asked for."""
    places = flat({8: (0.0, 1), 7: (float("-inf"), 2)})
    output = generated(silent, params_of({"logprobs": True}, num_top=2), [8], "stop", None, places)
    assert list(output.likeliest()) == [[(8, 0.0), (7, -9999.0)]]


@pytest.mark.parametrize(("num_refusals", "limit_s", "is_reset"), [(3, 60.0, True), (3, -1.0, False), (0, -1.0, True)])
def test_a_cache_that_is_in_use_is_reset_once_it_is_free(silent, num_refusals, limit_s, is_reset):
    silent.reset_limit_s, silent.engine.num_refusals = limit_s, num_refusals
    assert asyncio.run(silent.reset_caches()) is is_reset
    assert silent.engine.resets == ([*["prefix"] * (num_refusals + 1), "encoder"] if is_reset else ["prefix"])
