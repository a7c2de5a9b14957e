"""Rollouts by vLLM in the learner's process beside ``generate()``, the same prompts, greedy, float32 on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from conformance.doubles.digits import MODEL, load_model, requests_for, scenes, template_of, tokens_of
from rollmatch.config.rollout_matching import RolloutMatchingConfig
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend
from rollmatch.rollout.vllm_colocate import EngineSettings, VllmColocateBackend

DECODING = Decoding(max_new_tokens=128)
NUM_SCENES = 64
DEFAULT_SIZE: int = RolloutMatchingConfig.model_fields["rollout_generate_batch_size"].default


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def requests():
    return requests_for(scenes()[:NUM_SCENES])


@pytest.fixture(scope="module")
def policy():
    return load_model()


@pytest.fixture
def generate_by_hf(policy, requests, request):
    """Microbatches of the given size, on as many threads as suits that size best."""
    backend = HfBackend(policy, template_of(), batch_size=request.param)
    count = 1 if request.param < 16 else torch.multiprocessing.cpu_count()

    def generate() -> list:
        with threads(count):
            return backend.generate(requests, DECODING)

    return generate


@pytest.fixture(scope="module")
def generate_by_vllm(policy, requests):
    settings = EngineSettings(
        model=str(MODEL),
        dtype="float32",
        max_model_len=512,
        engine_arguments={
            "kv_cache_memory_bytes": 128 * 2**20,
            "enforce_eager": True,
            "max_num_seqs": NUM_SCENES,
            "enable_prefix_caching": False,  # the same prompts come again; a training run's do not
            "limit_mm_per_prompt": {"image": 1, "video": 0},
        },
    )
    with threads(1):
        backend = VllmColocateBackend(settings, template_of(), Ranks())
        backend.push(merged_weights(policy), version=1)

    def generate() -> list:
        with threads(1):
            backend._engine.llm_engine.reset_encoder_cache()
            return backend.generate(requests, DECODING)

    generate()  # the first tokens of an engine take longest
    yield generate
    backend.close()


@pytest.mark.parametrize(
    ("generate_by_hf", "bar"),
    [pytest.param(DEFAULT_SIZE, 4, id="of-the-default-size"), *((size, None) for size in (4, 16, NUM_SCENES))],
    indirect=["generate_by_hf"],
)
def test_vllm_beside_generate_in_microbatches(side_by_side, generate_by_vllm, generate_by_hf, bar):
    """The tokens are the same, so times compare. The bar holds at the default ``rollout_generate_batch_size``."""
    wrote = {}

    def by_vllm():
        wrote["vllm"] = generate_by_vllm()

    def by_hf():
        wrote["hf"] = generate_by_hf()

    side_by_side(by_vllm, by_hf, bar=bar, rounds=1)  # the ratio is twice its bar
    assert tokens_of(wrote["vllm"]) == tokens_of(wrote["hf"])
