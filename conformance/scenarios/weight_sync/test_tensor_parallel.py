"""Two ranks that share one engine answer what the learner's own generate() answers, each its own requests.

The engine applies adapters, too, which changes nothing where all weights are pushed.

As a script (``FOLDER``) it is one of the ranks, which writes its answers.
"""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.colocated_engine import open_engine
from conformance.doubles.digits import load_model, perturb, requests_for, scenes, template_of, tokens_of
from conformance.doubles.started import finish_ranks
from rollmatch.config.training import TunerConfig
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.fence import Counted, SyncMode
from rollmatch.rollout.hf import HfBackend
from rollmatch.weights.named_weights import named_weights

pytestmark = [pytest.mark.engine, pytest.mark.wide]
LANGUAGE = r"model\.language_model\..*\.(q_proj|v_proj|down_proj)"
WORKER = ("-m", "conformance.scenarios.weight_sync.test_tensor_parallel")


def shared_memory():
    """Names of what ranks of our engines share on this machine."""
    return {path.name for path in Path("/dev/shm").glob("rollmatch-*-tp*")}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Of both ranks: name -> [request id, response]."""
    folder, before = tmp_path_factory.mktemp("tensor_parallel"), shared_memory()
    finish_ranks(folder, 2, sys.executable, *WORKER, str(folder))
    assert shared_memory() <= before  # what the ranks shared is gone with them
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in SHARES]


@pytest.fixture(scope="module")
def expected():
    """The same of the model, before and after its weights were changed."""
    requests = requests_for(scenes()[:8])
    model, responses = load_model(), {}
    for name in ("original", "perturbed"):
        rollouts = HfBackend(model, template_of(), batch_size=8).generate(
            requests, Decoding(max_new_tokens=MAX_NEW_TOKENS)
        )
        responses[name] = [list(tokens) for tokens in tokens_of(rollouts)]
        perturb(model, seed=1, scale=0.3)
    for name, policy in zip(("first adapter", "second adapter", "merged"), adapted_policies(), strict=True):
        rollouts = HfBackend(policy, template_of(), batch_size=8).generate(
            requests, Decoding(max_new_tokens=MAX_NEW_TOKENS)
        )
        responses[name] = [list(tokens) for tokens in tokens_of(rollouts)]
    return responses


def adapted_policies():
    """One policy three times, its adapters changed in between; its base is not that of its files."""
    ranks = {"v_proj": 8}
    torch.manual_seed(5)  # the same adapter in every process
    policy = load_model(TunerConfig(train_type="lora", target_regex=LANGUAGE, lora_rank=4, rank_pattern=ranks))
    perturb(policy.get_base_model(), seed=1, scale=0.1)
    for seed in range(3):
        yield perturb_adapters(policy, named="lora_B", by=0.1, seed=seed)


@pytest.mark.scenario(
    "weight-sync/a-colocated-engine-loads-adapters", clauses=["weight-sync/adapter-sync-sends-adapters-only#4"]
)
def test_an_adapter_travels_alone_once_the_base_is_there(answers):
    for answered in answers:
        assert [mode for mode, _ in answered["carried"]] == ["adapter", "adapter"]
        (_, first), (_, second) = answered["carried"]
        policy = next(adapted_policies())
        bytes_of = {name: weight.nbytes for name, weight in policy.named_parameters()}
        assert second == sum(number for name, number in bytes_of.items() if "lora_" in name)
        assert first - second == sum(number for name, number in bytes_of.items() if "lora_" not in name)


@pytest.mark.parametrize("weights", ["original", "perturbed", "first adapter", "second adapter", "merged"])
def test_every_rank_gets_the_answers_to_its_own_requests_in_order(weights, answers, expected):
    for rank, places in SHARES.items():
        ids, responses = zip(*answers[rank][weights], strict=True)
        assert list(ids) == [f"0.{rank}.{index}" for index in range(len(places))]
        assert list(responses) == [expected[weights][place] for place in places]


def test_changed_weights_change_the_answers(expected):
    assert sum(a != b for a, b in zip(expected["original"], expected["perturbed"], strict=True)) > 4


def test_a_rank_without_requests_takes_part(answers):
    first, second = (some["one rank idle"] for some in answers)
    assert first == answers[0]["original"]
    assert second == []


SHARES = {0: range(5), 1: range(5, 8)}
"""Scenes of each rank: not as many."""
MAX_NEW_TOKENS = 40
"""Enough for two objects; two engines that step together wait for each other at every layer."""


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    decoding = Decoding(max_new_tokens=MAX_NEW_TOKENS)
    ranks = Ranks.from_environment()
    backend = open_engine(ranks, tensor_parallel_size=2, lora_rank=8)
    model, answers = load_model(), {}
    requests = requests_for([scenes()[place] for place in SHARES[ranks.rank]], rank=ranks.rank)
    for version, name in enumerate(("original", "perturbed"), start=1):
        backend.push(merged_weights(model), version=version)
        rollouts = backend.generate(requests, decoding)
        answers[name] = [[rollout.request_id, rollout.response_token_ids] for rollout in rollouts]
        perturb(model, seed=1, scale=0.3)
    backend.push(merged_weights(load_model()), version=3)
    idle = backend.generate(requests if ranks.is_primary else [], decoding)
    answers["one rank idle"] = [[rollout.request_id, rollout.response_token_ids] for rollout in idle]
    mode, answers["carried"] = SyncMode("adapter"), []
    for version, (name, policy) in enumerate(zip(("first adapter", "second adapter", "merged"), adapted_policies()), 4):
        weights = Counted(partial(named_weights, policy))
        if name == "merged":
            backend.push(weights, version=version)
        else:
            carried = mode.push(backend, weights, ranks, version=version)
            answers["carried"].append([carried, weights.num_bytes])
        rollouts = backend.generate(requests, decoding)
        answers[name] = [[rollout.request_id, rollout.response_token_ids] for rollout in rollouts]
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(answers))
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
