"""A real engine in this process, as small as can be, with the digits model or another; hand it weights before use."""

from pathlib import Path
from typing import Any

from conformance.doubles.digits import MODEL, template_of
from rollmatch.model.template import Template
from rollmatch.ranks import Ranks
from rollmatch.rollout.vllm_colocate import EngineSettings, VllmColocateBackend

ARGUMENTS = {
    "seed": 0,
    "kv_cache_memory_bytes": 128 * 2**20,
    "enforce_eager": True,
    "max_num_seqs": 32,
    "limit_mm_per_prompt": {"image": 1, "video": 0},
}


def open_engine(
    ranks: Ranks,
    *,
    model: Path = MODEL,
    template: Template | None = None,
    tensor_parallel_size: int = 1,
    lora_rank: int | None = None,
    **arguments: Any,
) -> VllmColocateBackend:
    """``arguments``: vLLM's, in place of ours."""
    settings = EngineSettings(
        model=str(model),
        dtype="float32",
        max_model_len=768,
        tensor_parallel_size=tensor_parallel_size,
        lora_rank=lora_rank,
        engine_arguments=ARGUMENTS | arguments,
    )
    return VllmColocateBackend(settings, template or template_of(), ranks)
