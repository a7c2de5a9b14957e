"""A real engine in this process with the digits model, as small as can be; hand it weights before use."""

from conformance.rollout.digits import MODEL, template_of
from rollmatch.ranks import Ranks
from rollmatch.rollout.vllm_colocate import EngineSettings, VllmColocateBackend


def open_engine(ranks: Ranks, *, tensor_parallel_size: int = 1) -> VllmColocateBackend:
    settings = EngineSettings(
        model=str(MODEL),
        dtype="float32",
        max_model_len=768,
        tensor_parallel_size=tensor_parallel_size,
        engine_arguments={
            "seed": 0,
            "kv_cache_memory_bytes": 128 * 2**20,
            "enforce_eager": True,
            "max_num_seqs": 32,
            "limit_mm_per_prompt": {"image": 1, "video": 0},
        },
    )
    return VllmColocateBackend(settings, template_of(), ranks)
