"""``rollmatch serve``: its options, and which server they ask for."""

import argparse

from rollmatch.cli.configured import add_config
from rollmatch.config import load_config
from rollmatch.launch.processes import parse_gpus


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with its options."""
    serve = commands.add_parser("serve", help="start a rollout server")
    add_config(serve, _serve)
    serve.add_argument(
        "--gpus", type=parse_gpus, metavar="LIST", help="GPUs such as 0,1,2; on CPU, one replica per entry"
    )
    serve.add_argument(
        "--server", type=int, metavar="INDEX", help="index of the server to start, if the YAML names several"
    )
    serve.add_argument("--dry-run", action="store_true", help="print the command and its environment; start nothing")


def _serve(options: argparse.Namespace) -> int:
    if load_config(options.config, options.overrides).custom.extra.rollout_server.engine == "swift":
        from rollmatch.interop.swift_cli import serve_by_swift as serve
    else:
        from rollmatch.launch.rollout_server import serve

    return serve(
        options.config,
        overrides=options.overrides,
        gpus=options.gpus,
        server_index=options.server,
        dry_run=options.dry_run,
    )
