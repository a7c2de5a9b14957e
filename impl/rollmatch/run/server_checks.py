"""Wait for the rollout servers, then compare model, GPUs and size with the configuration."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from rollmatch.config import RunConfig, effective
from rollmatch.config.connection import is_loopback
from rollmatch.config.servers import ServerAddress, pair_servers, server_key, server_section, uses_servers
from rollmatch.dialects.http import ServerRefused
from rollmatch.dialects.reply import Health
from rollmatch.dialects.session import ClientSettings, RolloutServer, ServerUnreachable
from rollmatch.errors import LaunchError
from rollmatch.server.identity import load_model_identity
from rollmatch.server.settings import KEY_VARIABLE

NUM_NODES_VARIABLE = "GROUP_WORLD_SIZE"
"""Set by torchrun, and by ``accelerate launch`` through it."""


def check_gpus(base_url: str, health: Health, gpus: Sequence[str]) -> None:
    """Raise ``gpus-overlap`` where a server on this machine, by its health, works on one of the learner's ``gpus``."""
    theirs = health.get("gpus") or ()
    shared = [gpu for gpu in gpus if gpu in theirs]
    if shared and is_loopback(urlsplit(base_url).hostname or ""):
        raise LaunchError(
            f"{base_url} works on {', '.join(theirs)}, the learner was given {', '.join(gpus)}",
            code="gpus-overlap",
            key="--gpus",
            remedy=f"Name other GPUs than {', '.join(shared)} for one of them.",
        )


def check_model(server: RolloutServer, config: RunConfig) -> None:
    """Raise ``served-model-differs`` where a server reports other tensors than those of ``model.model``."""
    identity = _identity(server)
    digest = identity.get("model_digest")
    if digest is None:
        return
    model = load_model_identity(config.model.model, dtype=effective.engine_dtype(config))
    if digest != model.digest:
        raise LaunchError(
            f"{server.base_url} serves {identity.get('model')}, with tensors of other names, shapes or types",
            code="served-model-differs",
            key="model.model",
            remedy="Serve and train with the same YAML.",
        )


def _identity(server: RolloutServer) -> dict[str, object]:
    """Empty where a server has no such route."""
    try:
        return server.get("/native/identity", dict[str, object])
    except ServerRefused as refusal:
        if refusal.status == HTTPStatus.NOT_FOUND:
            return {}
        raise


LOOK_S = 1.0
"""Longest wait for one server's health before its process is checked again."""
_NOTICE_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitPolicy:
    """How long a learner waits for its servers."""

    timeout_s: float | None = None
    """None uses the configured limit, 0 tries once."""
    server_pid: int | None = None
    """Stop waiting when this process ends."""


def wait_for_servers(
    config: RunConfig, wait: WaitPolicy, *, gpus: Sequence[str] = (), check: Callable[[], None] = lambda: None
) -> None:
    """Wait until all servers are healthy and match the configuration; ``gpus`` are the learner's, where known.

    ``check`` is called about once a second, and raises where there is nothing left to wait for.
    Errors: those of ``check``, ``ServerUnreachable``, ``server-process-died``, ``world-size-mismatch``, those of
    ``served``, and the refusal of a server whose workers are dead or that wants another key.
    """
    section = server_section(config)
    limit_s = section.timeout_s if wait.timeout_s is None else wait.timeout_s
    deadline = time.monotonic() + limit_s
    settings = ClientSettings(timeout_s=limit_s, api_key=os.environ.get(KEY_VARIABLE) or None)
    for address in pair_servers(section):
        server = RolloutServer(address.base_url, settings)
        health = _await_health(server, check, deadline=deadline, limit_s=limit_s, server_pid=wait.server_pid)
        check_server(server, health, config, gpus=gpus)


def wait_for_notice(notice: Path, check: Callable[[], None]) -> None:
    """Wait until the launcher, which waits for the servers, has written a file; it ends this process if they fail.

    Errors: those of ``check``.
    """
    while not notice.exists():
        check()
        time.sleep(_NOTICE_POLL_S)


def check_server(server: RolloutServer, health: Health, config: RunConfig, *, gpus: Sequence[str]) -> None:
    """Compare a healthy server's size, GPUs and model with the configuration. Errors: as ``wait_for_servers``."""
    _check_world_size(server, config)
    check_gpus(server.base_url, health, gpus)
    check_model(server, config)


def learner_gpus() -> list[str]:
    """GPUs that this process was given, as it names them."""
    return [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]


def _await_health(
    server: RolloutServer, check: Callable[[], None], *, deadline: float, limit_s: float, server_pid: int | None
) -> Health:
    """The reply of /health/, as soon as the server is healthy; the first look without it says what is waited for."""
    is_announced = os.environ.get("RANK", "0") != "0"
    while True:
        check()
        if server_pid is not None and not _lives(server_pid):
            problem = f"process {server_pid} has ended, and {server.base_url} does not answer"
            raise LaunchError(
                problem, code="server-process-died", key="--server-pid", remedy="See the server's own output."
            )
        left_s = deadline - time.monotonic()
        try:
            return server.wait_until_healthy(min(LOOK_S, max(left_s, 0.1)))
        except ServerUnreachable as error:
            if left_s <= LOOK_S:
                seen = error.problem.rpartition(" s: ")[2]
                problem = f"{server.base_url} was not healthy within {limit_s:g} s: {seen}"
                raise ServerUnreachable(problem, key=server.base_url, remedy=error.remedy) from error
            if not is_announced:
                print(f"waiting for {server.base_url} to be healthy, {left_s:.0f} s at most", flush=True)
                is_announced = True


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _check_world_size(server: RolloutServer, config: RunConfig) -> None:
    sizes = config.custom.extra.rollout_server
    tp, dp = sizes.vllm_tensor_parallel_size, sizes.vllm_data_parallel_size
    try:
        found = server.world_size()
    except ServerRefused as refusal:
        if refusal.status == HTTPStatus.NOT_FOUND:  # stock vLLM has no such route
            return
        raise
    if found == tp * dp if dp else found % tp == 0:
        return
    expected = f"{tp * dp}" if dp else f"a multiple of vllm_tensor_parallel_size {tp}"
    raise LaunchError(
        f"{server.base_url} has {found} workers, the configuration expects {expected}",
        code="world-size-mismatch",
        key="custom.extra.rollout_server",
        remedy="Serve and train with the same YAML.",
    )


def check_servers_reachable(
    config: RunConfig, *, num_nodes: int | None = None, addresses: Sequence[ServerAddress] | None = None
) -> None:
    """Check that a learner on several machines names its servers by addresses that mean the same on all of them.

    ``num_nodes``: by default what torchrun says in the environment. ``addresses``: by default those of ``config``.
    Errors: ``loopback-on-several-nodes``.
    """
    count = int(os.environ.get(NUM_NODES_VARIABLE, "1")) if num_nodes is None else num_nodes
    if count == 1 or not uses_servers(config):
        return
    loopback = [one for one in addresses or pair_servers(server_section(config)) if is_loopback(one.host)]
    if loopback:
        problem = f"{loopback[0].base_url} is another machine on each of {count} nodes"
        remedy = "Name the server's machine, and let it listen there: custom.extra.rollout_server.host."
        raise LaunchError(problem, code="loopback-on-several-nodes", key=server_key(config), remedy=remedy)
