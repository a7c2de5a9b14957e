"""``rollmatch serve``: check everything while nothing is started, then become the rollout server.

The launcher replaces itself by the server it starts, so a signal needs no passing on and nothing can be orphaned.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rollmatch.config import RunConfig, effective, load_config
from rollmatch.config.connection import is_loopback
from rollmatch.config.files import check_model
from rollmatch.config.servers import (
    ServerAddress,
    disables_custom_all_reduce,
    max_model_len,
    memory_share,
    pair_servers,
    prefix_caching,
    server_key,
    server_section,
)
from rollmatch.errors import LaunchError
from rollmatch.launch.processes import PYTHON, Command, become
from rollmatch.model.source import with_local_model
from rollmatch.run.machine import ENVIRONMENT, cpu_environment, has_gpu
from rollmatch.server.port import bind_http
from rollmatch.server.settings import KEY_VARIABLE, ServerSettings, check_exposure

_SECTION = "custom.extra.rollout_server"
SERVER_ENVIRONMENT = ENVIRONMENT | {
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore:resource_tracker:UserWarning,ignore:TensorFloat32:UserWarning"
}


def serve(
    path: str,
    *,
    overrides: Sequence[str],
    gpus: Sequence[str] | None,
    server_index: int | None = None,
    dry_run: bool,
) -> int:
    """Start the server of a YAML; returns only from a dry run, which prints the command.

    On a machine without GPUs ``gpus`` counts replicas. Errors: the configuration's, ``gpu-count-mismatch``,
    ``server-not-named``, ``port-in-use``.
    """
    typed = load_config(path, overrides)
    config = with_local_model(typed)
    check_model(config)
    command = make_command(config, gpus=gpus, server_index=server_index, on_gpu=has_gpu(), name=typed.model.model)
    return start(command, config, server_index, dry_run=dry_run)


def start(command: Command, config: RunConfig, server_index: int | None, *, dry_run: bool) -> int:
    """Become the server, or print its command. Errors: ``server-not-named``, ``port-in-use``."""
    host, address = config.custom.extra.rollout_server.host, _address(config, server_index)
    if is_loopback(host) and not is_loopback(address.host):
        text = f"learners call {address.base_url}, and the server listens at {host}, where only this machine reaches it"
        print(f"rollmatch: {text}; set {_SECTION}.host: 0.0.0.0 if nothing here passes calls on", file=sys.stderr)
    if not dry_run:
        bind_http(host, port_of(config, server_index)).close()
        become(command)
    print(command)
    return 0


def make_command(
    config: RunConfig, *, gpus: Sequence[str] | None, server_index: int | None, on_gpu: bool, name: str | None = None
) -> Command:
    """The command line and environment; ``name`` is the model's as the user wrote it.

    Errors: ``gpu-count-mismatch``, ``server-not-named``.
    """
    devices, replicas = devices_of(config, gpus)
    port = port_of(config, server_index)
    settings = make_settings(config, port=port, replicas=replicas, on_gpu=on_gpu)
    check_exposure(settings)
    if name is not None:
        settings = dataclasses.replace(settings, served_model_names=(*settings.served_model_names, name))
    environment = server_environment(on_gpu=on_gpu, eager=effective.enforce_eager(config, on_gpu=on_gpu))
    environment |= {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if on_gpu else {}
    return Command(words=server_words(settings, gpus=devices if on_gpu else ()), environment=environment)


def devices_of(config: RunConfig, gpus: Sequence[str] | None) -> tuple[tuple[str, ...], int]:
    """GPUs of a server, and its number of replicas. Errors: ``gpu-count-mismatch``."""
    section = config.custom.extra.rollout_server
    size = section.vllm_tensor_parallel_size
    devices = tuple(gpus) if gpus is not None else _default_devices(config)
    replicas = section.vllm_data_parallel_size or len(devices) // size or 1
    if size * replicas != len(devices):
        raise LaunchError(
            f"tensor parallel {size} x data parallel {replicas} = {size * replicas}, but {len(devices)} GPUs are named",
            code="gpu-count-mismatch",
            key=f"{_SECTION}.vllm_data_parallel_size",
            remedy="Name as many GPUs, or change the parallel sizes.",
        )
    return devices, replicas


def server_environment(*, on_gpu: bool, eager: bool) -> dict[str, str]:
    """What is added to the environment of a rollout server, whichever; ``eager`` counts on a CPU only."""
    on_cpu = cpu_environment(eager=eager) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return SERVER_ENVIRONMENT | ({} if on_gpu else on_cpu)


def server_words(settings: ServerSettings, *, gpus: Sequence[str]) -> tuple[str, ...]:
    """The command line of our own server; a bearer key stays out of it, where other users could read it."""
    settings = dataclasses.replace(settings, gpus=tuple(gpus))
    return (*PYTHON, "-m", "rollmatch.serve.process", settings.to_json())


def make_settings(config: RunConfig, *, port: int, replicas: int, on_gpu: bool) -> ServerSettings:
    """Settings of our own server."""
    section, vllm = config.custom.extra.rollout_server, config.custom.extra.rollout_matching.vllm
    return ServerSettings(
        model=config.model.model,
        stop_token=config.model.stop_token,
        dtype=effective.engine_dtype(config),
        max_model_len=max_model_len(config),
        host=section.host,
        port=port,
        tensor_parallel_size=section.vllm_tensor_parallel_size,
        data_parallel_size=replicas,
        load_format=vllm.load_format,
        image_roots=tuple(str(Path(root).absolute()) for root in section.image_roots),
        allowed_media_domains=section.allowed_media_domains,
        drain_s=section.drain_s,
        api_key=os.environ.get(KEY_VARIABLE) or None,
        allow_no_key=section.allow_no_key,
        allowed_hosts=section.allowed_hosts,
        limits=section.limits,
        served_model_names=section.served_model_names,
        tool_call_parser=section.tool_call_parser,
        reasoning_parser=section.reasoning_parser,
        enable_lora=vllm.enable_lora,
        engine_arguments=_engine_arguments(config, on_gpu=on_gpu) | section.vllm_engine_kwargs,
    )


def _engine_arguments(config: RunConfig, *, on_gpu: bool) -> dict[str, object]:
    vllm = config.custom.extra.rollout_matching.vllm
    cache_mib = effective.kv_cache_memory_mib(config, on_gpu=on_gpu)
    arguments: dict[str, object] = {
        "seed": config.training.seed,
        "gpu_memory_utilization": memory_share(config),
        "kv_cache_memory_bytes": cache_mib * 2**20 if cache_mib else None,
        "enforce_eager": effective.enforce_eager(config, on_gpu=on_gpu),
        "quantization": effective.quantization(config),
        "enable_prefix_caching": prefix_caching(config),
        "max_num_seqs": vllm.max_num_seqs,
        "max_num_batched_tokens": vllm.max_num_batched_tokens,
        "enable_chunked_prefill": vllm.enable_chunked_prefill,
        "limit_mm_per_prompt": vllm.limit_mm_per_prompt,
        "mm_processor_kwargs": config.model.processor_kwargs or None,
        "disable_custom_all_reduce": disables_custom_all_reduce(config),
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _default_devices(config: RunConfig) -> tuple[str, ...]:
    section = config.custom.extra.rollout_server
    return tuple(map(str, range(section.vllm_tensor_parallel_size * (section.vllm_data_parallel_size or 1))))


def _address(config: RunConfig, index: int | None) -> ServerAddress:
    """The server to be started. Errors: ``server-not-named``."""
    addresses, key = pair_servers(server_section(config)), server_key(config)
    if not addresses:
        remedy = "Set base_url and group_port; the port of base_url is the one to listen at."
        raise LaunchError("the YAML names no server", code="server-not-named", key=key, remedy=remedy)
    if index is None and len(addresses) > 1:
        remedy = "Say which one with --server."
        raise LaunchError(f"the YAML names {len(addresses)} servers", code="server-not-named", key=key, remedy=remedy)
    if not 0 <= (index or 0) < len(addresses):
        remedy = f"Say one from 0 to {len(addresses) - 1}."
        raise LaunchError(f"there is no server {index}", code="server-not-named", key=key, remedy=remedy)
    return addresses[index or 0]


def port_of(config: RunConfig, index: int | None) -> int:
    """The HTTP port of the server to be started. Errors: ``server-not-named``."""
    parts = urlsplit(_address(config, index).base_url)
    return parts.port or (443 if parts.scheme == "https" else 80)
