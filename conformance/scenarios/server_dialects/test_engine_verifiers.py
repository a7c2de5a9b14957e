"""Unmodified verifiers, 0.1.x and its v1 API, roll out against the OpenAI routes, with ids and log-probabilities."""

import json
import subprocess

import pytest

from conformance.doubles.digits import MODEL
from conformance.tools.outside_tools import python_of

pytestmark = pytest.mark.engine

ROLLOUTS = """
import json, sys
import verifiers as vf
from datasets import Dataset
from openai import OpenAI

def length(completion, **kwargs) -> float:
    return float(len(completion[-1]["content"]))

class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Again."}]

url, model = sys.argv[1:]
questions = [{"question": f"{i} + 2?", "answer": "4"} for i in range(2)]
sampling = {"n": 1, "logprobs": True, "max_tokens": 6, "temperature": 1.0, "seed": 1, "extra_body": {
    "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "include_stop_str_in_output": False,
    "return_tokens_as_token_ids": True, "return_token_ids": True}}
played = []
for kind, more in ((vf.SingleTurnEnv, {}), (Twice, {"max_turns": 2})):
    env = kind(dataset=Dataset.from_list(questions), rubric=vf.Rubric(funcs=[length]), **more)
    client = OpenAI(base_url=url, api_key="none")
    made = env.generate_sync(env.get_dataset(), client=client, model=model, sampling_args=sampling)
    for state in made["state"]:
        played.append({"reward": state["reward"], "turns": [step["tokens"] for step in state["trajectory"]]})
print(json.dumps(played))
"""


CLIENTS = """
import asyncio, json, sys
import verifiers.v1 as vf
from verifiers.v1.clients import resolve_client
from verifiers.v1.dialects import ChatDialect

url, model = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 6}
train = vf.TrainClientConfig(base_url=url, api_key_var="NONE", renderer={"name": "default"})

async def ask(config):
    sampling = vf.SamplingConfig(max_tokens=6, temperature=1.0)
    return await resolve_client(config).get_response(ChatDialect(), body, sampling, session_id="a")

async def main():
    trained, relayed = [await ask(one) for one in (train, vf.EvalClientConfig(base_url=url, api_key_var="NONE"))]
    ids, logprobs = trained.tokens.completion_ids, trained.tokens.completion_logprobs
    usage = [one.usage.prompt_tokens for one in (trained, relayed)]
    print(json.dumps([trained.tokens.prompt_ids, ids, logprobs, usage, relayed.usage.completion_tokens]))

asyncio.run(main())
"""


@pytest.mark.verifiers_v1
@pytest.mark.scenario(clauses=["server-dialects/the-openai-dialect-serves-openai-clients#11"])
def test_both_clients_of_verifiers_v1_get_a_turn(instance):
    command = [python_of("verifiers_v1"), "-c", CLIENTS, f"{instance.url}/v1", str(MODEL)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    prompt_ids, ids, logprobs, prompts, relayed = json.loads(ran.stdout.splitlines()[-1])
    assert prompts == [len(prompt_ids)] * 2
    assert 0 < len(ids) == len(logprobs) <= 6
    assert max(logprobs) < 0
    assert 0 < relayed <= 6


@pytest.mark.verifiers
@pytest.mark.scenario(
    "server-dialects/verifiers-rolls-out", clauses=["server-dialects/the-openai-dialect-serves-openai-clients#8"]
)
def test_environments_of_verifiers_get_what_they_train_on(instance):
    python = python_of("verifiers")
    command = [python, "-c", ROLLOUTS, f"{instance.url}/v1", str(MODEL)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    states = json.loads(ran.stdout.splitlines()[-1])
    assert [len(state["turns"]) for state in states] == [1, 1, 2, 2]
    for state in states:
        assert state["reward"] >= 0
        for tokens in state["turns"]:
            assert len(tokens["completion_ids"]) == len(tokens["completion_logprobs"]) == 6
            assert max(tokens["completion_logprobs"]) <= 0
            assert tokens["prompt_ids"]
        if len(state["turns"]) == 2:
            first, then = state["turns"]
            assert len(then["prompt_ids"]) > len(first["prompt_ids"]) + 6
