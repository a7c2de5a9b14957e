"""Rollout server arguments of TRL and verifiers (``use_vllm_server`` and four more), as overrides of the YAML."""

import argparse

from rollmatch.config import RunConfig
from rollmatch.config.connection import FIRST_GROUP_PORT, base_url_of
from rollmatch.config.servers import uses_servers
from rollmatch.errors import LaunchError

_SECTION = "custom.extra.rollout_matching.vllm"
_NAMES = ("vllm_host", "vllm_server_port", "vllm_group_port", "vllm_connection_timeout")


def overrides_of(options: argparse.Namespace) -> list[str]:
    """The arguments as ``a.b=VALUE``. Errors: ``server-not-used``."""
    given = {name: getattr(options, name) for name in _NAMES if getattr(options, name) is not None}
    if not options.use_vllm_server:
        if given:
            name = next(iter(given))
            raise LaunchError(
                "no rollout server is used",
                code="server-not-used",
                key=f"--{name}",
                remedy="Add --use_vllm_server.",
            )
        return []
    host, port = given.get("vllm_host", "127.0.0.1"), given.get("vllm_server_port", 8000)
    return [
        f"{_SECTION}.mode=server",
        f"{_SECTION}.server.servers=null",
        f"{_SECTION}.server.servers_file=null",
        f"{_SECTION}.server.base_url={base_url_of(host, port)}",
        f"{_SECTION}.server.group_port={given.get('vllm_group_port', FIRST_GROUP_PORT)}",
        f"{_SECTION}.server.timeout_s={given.get('vllm_connection_timeout', 60.0)}",
    ]


def check_used(config: RunConfig) -> None:
    """Raise ``server-not-used`` where ``--use_vllm_server`` is given and the YAML generates in the learner."""
    rules = config.custom.extra.rollout_matching
    if not uses_servers(config):
        key = "custom.extra.rollout_matching.rollout_backend"
        problem = f"is {rules.rollout_backend}, but --use_vllm_server requires a rollout server"
        remedy = "Set it to vllm in the YAML, or leave out --use_vllm_server."
        raise LaunchError(problem, code="server-not-used", key=key, remedy=remedy)
