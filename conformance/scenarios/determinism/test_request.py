"""Requests and their seeds; what a colocated engine does to give its memory to the learner."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conformance.doubles.attached import attaching
from conformance.doubles.records import make_sample
from rollmatch.ranks import Ranks
from rollmatch.records import Sample
from rollmatch.rollout.backend import derive_seed
from rollmatch.rollout.vllm_colocate import EngineSettings, VllmColocateBackend


def sample(index: int) -> Sample:
    return make_sample(sample_id=index)


def prompt_of(some: Sample) -> tuple[int, ...]:
    return (5, some.sample_id)


@pytest.mark.parametrize(("word", "seed"), [(0, 1), (2**31, 1), (1, 1), (2**31 + 5, 5), (2**32 - 1, 2**31 - 1)])
def test_a_word_that_would_read_as_unset_becomes_one(word, seed, monkeypatch):
    class Fixed:
        def __init__(self, entropy):
            pass

        def generate_state(self, num_words, dtype):
            return np.array([word], dtype)

    monkeypatch.setattr(np.random, "SeedSequence", Fixed)
    assert derive_seed(1, step=2, rank=3, index=4) == seed


@pytest.mark.scenario(
    "determinism/seeds-differ-within-a-step-and-between-steps",
    "determinism/ranks-do-not-repeat-each-other",
    clauses=["determinism/every-request-has-a-seed-of-its-own#1,2"],
)
def test_seeds_differ_over_runs_steps_ranks_and_indices():
    places = [(r, s, k, i) for r in (0, 42) for s in range(8) for k in range(4) for i in range(32)]
    assert len({derive_seed(r, step=s, rank=k, index=i) for r, s, k, i in places}) == len(places)


def of_rank(source, rank):
    template = SimpleNamespace(prompt_token_ids=prompt_of)
    return replace(source, template=template, ranks=Ranks(rank=rank, learner_world_size=2))


@pytest.mark.scenario(clauses=["determinism/every-request-has-a-seed-of-its-own#5"])
def test_an_evaluation_and_requests_made_again_have_seeds_of_their_own(tmp_path):
    samples = [sample(index) for index in range(4)]
    with attaching(tmp_path / "journal.jsonl") as make:
        _, _, source = make(learner_world_size=2)
        asked = [
            request
            for purpose in ("train", "again", "eval")
            for rank in range(2)
            for request in of_rank(source, rank).make_requests(samples, 3, purpose=purpose)
        ]
    assert len({request.seed for request in asked}) == len({request.request_id for request in asked}) == 24


class Engine:
    """Writes down what it is asked."""

    def __init__(self):
        self.asked = []
        self.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: None)

    def sleep(self, *, level):
        self.asked.append(f"sleep {level}")

    def wake_up(self, *, tags):
        self.asked += [f"wake {tag}" for tag in tags]

    def apply_model(self, work):
        model = torch.nn.Module()
        model.load_weights = lambda weights: self.asked.append(f"load {[name for name, _ in weights]}")
        work(model)

    def reset_prefix_cache(self):
        pass


@pytest.fixture
def backend_of(monkeypatch):
    def make(*, sleeps):
        monkeypatch.setattr("rollmatch.rollout.vllm_colocate._open_engine", lambda settings, ranks: Engine())
        settings = EngineSettings(model="m", dtype="float32", max_model_len=8, sleeps=sleeps)
        backend = VllmColocateBackend(settings, template=SimpleNamespace(load_images=None), ranks=None)
        return backend, backend._engine.asked

    return make


def weights():
    return [("w", torch.zeros(1))]


def test_new_weights_wake_the_memory_of_weights_first_and_the_cache_last(backend_of):
    backend, asked = backend_of(sleeps=True)
    backend.push(weights(), version=1)
    backend.rest()
    backend.rest()  # a step that asked for nothing
    backend.push(weights(), version=2)
    assert asked == ["load ['w']", "sleep 1", "wake weights", "load ['w']", "wake kv_cache"]


def test_rollouts_by_the_same_weights_wake_everything_once(backend_of):
    backend, asked = backend_of(sleeps=True)
    backend.push(weights(), version=1)
    backend.rest()
    assert backend.generate([], decoding=None) == backend.generate([], decoding=None) == []
    assert asked[1:] == ["sleep 1", "wake weights", "wake kv_cache"]


def test_an_engine_that_does_not_sleep_keeps_its_memory(backend_of):
    backend, asked = backend_of(sleeps=False)
    backend.push(weights(), version=1)
    backend.rest()
    backend.generate([], decoding=None)
    assert asked == ["load ['w']"]
