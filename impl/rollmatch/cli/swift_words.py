"""The command lines of ms-swift that say what our configuration says. Option names are those of ms-swift 4.6."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollmatch.config import RunConfig, effective
from rollmatch.config.rules import ArgumentHasOwnKey
from rollmatch.config.servers import max_model_len, memory_share, prefix_caching

SWIFT = "custom.extra.swift"


def rollout_words(config: RunConfig, *, port: int, replicas: int, on_gpu: bool) -> list[str]:
    """``swift rollout`` with the settings of the rollout server. Errors: ``ArgumentHasOwnKey``."""
    section, vllm = config.custom.extra.rollout_server, config.custom.extra.rollout_matching.vllm
    options = model_options(config) | {
        "host": section.host,
        "port": port,
        "vllm_tensor_parallel_size": section.vllm_tensor_parallel_size,
        "vllm_data_parallel_size": replicas,
        "vllm_gpu_memory_utilization": memory_share(config),
        "vllm_max_model_len": max_model_len(config),
        "vllm_enable_lora": False,
        "vllm_enable_prefix_caching": prefix_caching(config),
        "vllm_enforce_eager": effective.enforce_eager(config, on_gpu=on_gpu),
        "vllm_max_num_seqs": vllm.max_num_seqs,
        "vllm_disable_custom_all_reduce": vllm.disable_custom_all_reduce,
        "vllm_limit_mm_per_prompt": vllm.limit_mm_per_prompt,
        "vllm_engine_kwargs": _engine_kwargs(config, on_gpu=on_gpu) or None,
    }
    further = config.custom.extra.swift.rollout_options
    return ["swift", "rollout", *spell(options, further, key=f"{SWIFT}.rollout_options")]


def model_options(config: RunConfig) -> dict[str, Any]:
    """The policy, for both commands."""
    dtype, swift = config.model.torch_dtype, config.custom.extra.swift
    return {
        "model": config.model.model,
        "model_type": swift.model_type,
        "template": swift.template,
        "torch_dtype": None if dtype == "auto" else dtype,  # ms-swift's own default reads config.json, too
    }


def _engine_kwargs(config: RunConfig, *, on_gpu: bool) -> dict[str, Any]:
    """Engine arguments that have no option of their own."""
    vllm, cache_mib = config.custom.extra.rollout_matching.vllm, effective.kv_cache_memory_mib(config, on_gpu=on_gpu)
    arguments = {
        "kv_cache_memory_bytes": cache_mib * 2**20 if cache_mib else None,
        "max_num_batched_tokens": vllm.max_num_batched_tokens,
        "enable_chunked_prefill": effective.chunked_prefill(config, on_gpu=on_gpu, max_model_len=max_model_len(config)),
        "load_format": None if vllm.load_format == "auto" else vllm.load_format,
    }
    told = {name: value for name, value in arguments.items() if value is not None}
    return told | config.custom.extra.rollout_server.vllm_engine_kwargs


def spell(options: Mapping[str, Any], further: Mapping[str, Any], *, key: str) -> list[str]:
    """Options as words; those without a value are left out. Errors: ``ArgumentHasOwnKey``."""
    if twice := sorted(options.keys() & further.keys()):
        problem = "our configuration says this in a section of its own"
        raise ArgumentHasOwnKey(problem, key=f"{key}.{twice[0]}", remedy="Say it there, and remove it here.")
    told = {name: value for name, value in {**options, **further}.items() if value is not None}
    return [word for name, value in told.items() for word in (f"--{name}", *_spelled(value))]


def _spelled(value: Any) -> Sequence[str]:
    """A value as ms-swift's parser reads it.

    >>> _spelled(False), _spelled(["a", 1]), _spelled({"image": 1}), _spelled(0.6)
    (('false',), ('a', '1'), ('{"image": 1}',), ('0.6',))
    """
    if isinstance(value, list | tuple):
        return tuple(word for item in value for word in _spelled(item))
    if isinstance(value, dict):
        return (json.dumps(value),)
    return (str(value).lower() if isinstance(value, bool) else str(value),)
