"""Addresses and engine settings of a run's rollout servers, whichever section names them."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from rollmatch.config import effective
from rollmatch.config.connection import ServerConfig, base_url_of
from rollmatch.config.findings import ROLLOUT_MATCHING
from rollmatch.config.schema import RunConfig
from rollmatch.config.servers_file import read_entries
from rollmatch.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """One rollout server, in the order of the configuration."""

    base_url: str
    """Without a slash at its end."""
    group_port: int
    named_group_host: str | None = None

    @property
    def host(self) -> str:
        """Its machine's name or address."""
        return urlsplit(self.base_url).hostname or ""

    @property
    def group_host(self) -> str:
        """Host at which its weight-sync group opens."""
        return self.named_group_host or self.host


def pair_servers(server: ServerConfig) -> tuple[ServerAddress, ...]:
    """All forms of the section as one list; one port for a list of URLs counts on.

    Errors: ``servers-file-invalid``.

    >>> pair_servers(ServerConfig(base_url=("http://a:8000/", "http://b:8000"), group_port=51216))[1]
    ServerAddress(base_url='http://b:8000', group_port=51217, named_group_host=None)
    """
    entries = server.servers if server.servers_file is None else read_entries(server.servers_file)
    if entries is not None:
        return tuple(
            ServerAddress(
                base_url=entry.base_url.rstrip("/"), group_port=entry.group_port, named_group_host=entry.group_host
            )
            for entry in entries
        )
    urls = (server.base_url,) if isinstance(server.base_url, str) else server.base_url or ()
    configured = server.group_port
    first = configured if isinstance(configured, int) else 0
    ports = configured if isinstance(configured, tuple) else tuple(first + place for place in range(len(urls)))
    pairs = zip(urls, ports)
    return tuple(ServerAddress(base_url=url.rstrip("/"), group_port=port) for url, port in pairs)


SHARE, SHARE_IN_GRPO = 0.9, 0.6
"""A server has its GPUs to itself; GRPO's begins low, so that long summaries of large images fit."""


def is_named_in_rlhf(config: RunConfig) -> bool:
    """Whether rollouts come from the servers that ``rlhf`` names."""
    return config.rlhf.use_vllm and config.rlhf.vllm_mode == "server"


def uses_servers(config: RunConfig) -> bool:
    """Whether rollouts come from rollout servers."""
    rules = config.custom.extra.rollout_matching
    if not config.custom.learns_from_rollouts:
        return False
    return is_named_in_rlhf(config) or (rules.rollout_backend == "vllm" and rules.vllm.mode == "server")


def is_colocated(config: RunConfig) -> bool:
    """Whether the learner's ranks hold vLLM engines."""
    return effective.rollout_backend(config) == "vllm" and not uses_servers(config)


def sync_mode(config: RunConfig, *, learner_world_size: int) -> Literal["full", "adapter"]:
    """What a sync sends: auto is adapter exactly with enable_lora. Errors: ``adapter-with-several-ranks``."""
    vllm = config.custom.extra.rollout_matching.vllm
    if not vllm.carries_adapter:
        return "full"
    if learner_world_size > 1 and uses_servers(config):
        raise ConfigError(
            f"{vllm.sync.mode} means adapter here, and the learner has {learner_world_size} ranks",
            code="adapter-with-several-ranks",
            key=f"{ROLLOUT_MATCHING}.vllm.sync.mode",
            remedy="Set sync.mode to full.",
        )
    return "adapter"


def server_section(config: RunConfig) -> ServerConfig:
    """The servers that are named, in the form that ``pair_servers`` takes."""
    configured = config.custom.extra.rollout_matching.vllm.server
    if not is_named_in_rlhf(config):
        return configured
    rlhf = config.rlhf
    pairs, urls = zip(rlhf.vllm_server_host or (), rlhf.vllm_server_port or ()), rlhf.vllm_server_base_url
    return ServerConfig(
        base_url=(urls,) if isinstance(urls, str) else urls or tuple(base_url_of(host, port) for host, port in pairs),
        group_port=rlhf.vllm_server_group_port,
        timeout_s=rlhf.vllm_server_timeout,
        infer_timeout_s=configured.infer_timeout_s,
        health_timeout_s=configured.health_timeout_s,
        stall_timeout_s=configured.stall_timeout_s,
        retry_budget_s=configured.retry_budget_s,
        min_servers=configured.min_servers,
    )


def server_key(config: RunConfig) -> str:
    """The key under which servers are named."""
    if not is_named_in_rlhf(config):
        return f"{ROLLOUT_MATCHING}.vllm.server"
    return f"rlhf.vllm_server_{'host' if config.rlhf.vllm_server_base_url is None else 'base_url'}"


def max_model_len(config: RunConfig) -> int:
    """Most tokens of prompt and response together on a rollout server."""
    configured = config.custom.extra.rollout_server.vllm_max_model_len
    if configured is None and config.custom.trainer_variant == "grpo":
        return config.global_max_length
    return configured or effective.max_model_len(config)


def prefix_caching(config: RunConfig) -> bool:
    """Whether rollout servers keep attention caches of equal prompt beginnings."""
    configured = config.custom.extra.rollout_server.vllm_enable_prefix_caching
    return config.custom.extra.rollout_matching.vllm.enable_prefix_caching if configured is None else configured


def disables_custom_all_reduce(config: RunConfig) -> bool:
    """Whether the GPUs of a rollout server's engine reduce by NCCL."""
    configured = config.custom.extra.rollout_server.vllm_disable_custom_all_reduce
    return config.custom.extra.rollout_matching.vllm.disable_custom_all_reduce if configured is None else configured


def memory_share(config: RunConfig) -> float:
    """Share of a GPU's memory that a rollout server's engines take."""
    configured = config.custom.extra.rollout_server.vllm_gpu_memory_utilization
    return configured or (SHARE_IN_GRPO if config.custom.trainer_variant == "grpo" else SHARE)
