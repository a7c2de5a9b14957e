"""A rollout server by command-line arguments alone, as ``trl vllm-serve`` and verifiers' guide name them."""

import argparse
import json
import os
from collections.abc import Sequence

from rollmatch.errors import LaunchError
from rollmatch.launch.processes import Command, become
from rollmatch.launch.rollout_server import server_environment, server_words
from rollmatch.model.source import local_directory
from rollmatch.run.machine import has_gpu
from rollmatch.server.port import bind_http
from rollmatch.server.settings import KEY_VARIABLE, ServerSettings, check_exposure

_CACHE_MIB_ON_CPU = 512


_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE_MIB"


def vllm_serve(options: argparse.Namespace) -> int:
    """Become the server; returns only from a dry run.

    Errors: ``model-directory-missing``, ``open-without-key``, ``port-in-use``.
    """
    settings = make_settings(options, on_gpu=has_gpu())
    check_exposure(settings)
    command = make_command(settings, on_gpu=has_gpu())
    if not options.dry_run:
        bind_http(options.host, options.port).close()
        become(command)
    print(command)
    return 0


def make_settings(options: argparse.Namespace, *, on_gpu: bool) -> ServerSettings:
    """The arguments as server settings. Errors: ``model-directory-missing``."""
    model = local_directory(options.model, revision=None, key="--model")
    if not os.path.isdir(model):
        problem, remedy = f"{options.model} is no directory", "Name the directory of a saved model, or its hub id."
        raise LaunchError(problem, code="model-directory-missing", key="--model", remedy=remedy)
    arguments: dict[str, object] = {
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enable_prefix_caching": options.enable_prefix_caching,
        "kv_cache_memory_bytes": None if on_gpu else int(os.environ.get(_CACHE_VARIABLE, _CACHE_MIB_ON_CPU)) << 20,
        "enforce_eager": None if on_gpu else True,
    }
    return ServerSettings(
        model=model,
        dtype=options.dtype,
        max_model_len=options.max_model_len or own_length(model),
        host=options.host,
        api_key=os.environ.get(KEY_VARIABLE) or None,
        allow_no_key=options.allow_no_key,
        allowed_hosts=tuple(options.allowed_hosts),
        port=options.port,
        tensor_parallel_size=options.tensor_parallel_size,
        data_parallel_size=options.data_parallel_size,
        served_model_names=(*options.served_model_name, *([options.model] if options.model != model else [])),
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        enable_lora=options.enable_lora,
        allowed_media_domains=tuple(options.allowed_media_domains),
        engine_arguments={name: value for name, value in arguments.items() if value is not None},
    )


def own_length(model: str) -> int:
    """The longest sequence that a model's ``config.json`` names; 4096 where it names none."""
    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        described = json.load(file)
    return int((described.get("text_config") or described).get("max_position_embeddings", 4096))


def make_command(settings: ServerSettings, *, on_gpu: bool) -> Command:
    """The command line and what is added to the environment; all GPUs that are visible stay visible."""
    words = server_words(settings, gpus=_visible(settings) if on_gpu else ())
    return Command(words=words, environment=server_environment(on_gpu=on_gpu, eager=not on_gpu))


def _visible(settings: ServerSettings) -> Sequence[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(visible.split(",")) if visible else tuple(map(str, range(settings.world_size)))
