"""``rollmatch up``: its options."""

import argparse

from rollmatch.cli.configured import add_config
from rollmatch.cli.numbers import natural, positive
from rollmatch.cli.plan import add_forecast_arguments
from rollmatch.launch.up import up


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with its options."""
    parser = add_config(commands.add_parser("up", help="run servers and learner on a Ray cluster"), up)
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="Ray cluster to use (default: RAY_ADDRESS, else this machine)"
    )
    planned = "by default as rollmatch plan proposes for the cluster's GPUs; without GPUs"
    text = f"rollout servers ({planned}, as the YAML names)"
    parser.add_argument("--servers", type=positive, metavar="N", help=text)
    parser.add_argument("--learners", type=positive, metavar="N", help=f"learner ranks ({planned}, 1)")
    text = "nodes with as many learner ranks each (default: as few as hold them; without GPUs, 1)"
    parser.add_argument("--learner-nodes", type=positive, metavar="N", help=text)
    add_forecast_arguments(parser, default_gpu=None)
    text = "times that each command is started again (default: 3)"
    parser.add_argument("--max-restarts", type=natural, default=3, metavar="N", help=text)
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--resume", action="store_true", help="continue from the newest whole checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print the commands; start nothing")
    begin.add_argument("--overwrite", action="store_true", help="delete the run in training.output_dir and start over")
