"""What every room shares: the environment a run has, and the one vLLM engine a process may have."""

import pytest

from rollmatch.launch.learner import set_environment

set_environment()  # before torch and vLLM load: some variables only count then


@pytest.fixture(scope="session")
def engine_backend():
    """A real engine with the digits model, started by the first test that asks for it; hand it weights before use."""
    from conformance.rollout.digits import MODEL, template_of
    from rollmatch.ranks import Ranks
    from rollmatch.rollout.vllm_colocate import EngineSettings, VllmColocateBackend

    settings = EngineSettings(
        model=str(MODEL),
        dtype="float32",
        max_model_len=768,
        engine_arguments={
            "seed": 0,
            "kv_cache_memory_bytes": 128 * 2**20,
            "enforce_eager": True,
            "max_num_seqs": 32,
            "limit_mm_per_prompt": {"image": 1, "video": 0},
        },
    )
    backend = VllmColocateBackend(settings, template_of(), Ranks())
    yield backend
    backend.close()
