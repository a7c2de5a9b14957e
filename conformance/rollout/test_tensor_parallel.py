"""Two ranks that share one engine answer what the learner's own generate() answers, each its own requests."""

import json
import sys
from pathlib import Path

import pytest

from conformance.cli.started import finish_two_ranks
from conformance.rollout.digits import load_model, perturb, requests_for, scenes, template_of, tokens_of
from conformance.rollout.tensor_parallel_worker import MAX_NEW_TOKENS, SHARES
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend

pytestmark = pytest.mark.engine
WORKER = ("-m", "conformance.rollout.tensor_parallel_worker")


def shared_memory():
    """Names of what ranks of our engines share on this machine."""
    return {path.name for path in Path("/dev/shm").glob("rollmatch-*-tp*")}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Of both ranks: name -> [request id, response]."""
    folder, before = tmp_path_factory.mktemp("tensor_parallel"), shared_memory()
    finish_two_ranks(folder, sys.executable, *WORKER, str(folder))
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
