"""Two ranks that share one engine answer what the learner's own generate() answers, each its own requests.

As a script (``FOLDER``) it is one of the ranks, which writes its answers.
"""

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from conformance.doubles.colocated_engine import open_engine
from conformance.doubles.digits import load_model, perturb, requests_for, scenes, template_of, tokens_of
from conformance.doubles.started import finish_ranks
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend

pytestmark = pytest.mark.engine
WORKER = ("-m", "conformance.unit.rollout.test_tensor_parallel")


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
    return responses


@pytest.mark.parametrize("weights", ["original", "perturbed"])
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
    backend = open_engine(ranks, tensor_parallel_size=2)
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
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(answers))
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
