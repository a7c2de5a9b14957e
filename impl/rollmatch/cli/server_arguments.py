"""Rollout server arguments of TRL and verifiers (``--use_vllm_server`` and four more), as overrides of the YAML."""

import argparse

from rollmatch.cli.numbers import port, seconds
from rollmatch.config.connection import FIRST_GROUP_PORT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--use_vllm_server`` and its four arguments."""
    group = parser.add_argument_group("rollout server", "overrides vllm.mode and vllm.server of the YAML")
    group.add_argument("--use_vllm_server", action="store_true", help="generate on one rollout server")
    group.add_argument("--vllm_host", metavar="HOST", help="host of the rollout server (default: 127.0.0.1)")
    group.add_argument(
        "--vllm_server_port", type=port, metavar="PORT", help="HTTP port of the rollout server (default: 8000)"
    )
    text = f"port of the weight-sync group (default: {FIRST_GROUP_PORT})"
    group.add_argument("--vllm_group_port", type=port, metavar="PORT", help=text)
    text = "limit for connecting, not for generation (default: 60)"
    group.add_argument("--vllm_connection_timeout", type=seconds, metavar="SECONDS", help=text)
