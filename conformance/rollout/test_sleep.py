"""A colocated engine gives its memory to the learner: what is asked of vLLM, and in which order."""

from types import SimpleNamespace

import pytest
import torch

from rollmatch.rollout.vllm_colocate import EngineSettings, VllmColocateBackend


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
        work(SimpleNamespace(load_weights=lambda weights: self.asked.append(f"load {[name for name, _ in weights]}")))

    def reset_prefix_cache(self):
        pass


@pytest.fixture
def backend_of(monkeypatch):
    def make(*, sleeps):
        monkeypatch.setattr("rollmatch.rollout.vllm_colocate._open_engine", lambda settings, ranks: Engine())
        settings = EngineSettings(model="m", dtype="float32", max_model_len=8, sleeps=sleeps)
        backend = VllmColocateBackend(settings, template=None, ranks=None)
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
