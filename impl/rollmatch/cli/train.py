"""``rollmatch train``: its options, and which launcher they ask for."""

import argparse
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rollmatch.cli import server_arguments
from rollmatch.cli.configured import add_config
from rollmatch.cli.numbers import positive, seconds
from rollmatch.config import load_config
from rollmatch.errors import LaunchError
from rollmatch.launch.nodes import Nodes, Placement, nodes_of
from rollmatch.launch.processes import parse_gpus, visible
from rollmatch.launch.server_arguments import check_used, overrides_of

RESUMES = ("--resume", "--resume_from_checkpoint", "--resume-from-checkpoint")
"""Our option, and transformers', which takes a path."""
RESUMING = ("train", "up")
"""Commands that can resume; others may read the command line of another trainer."""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with its options."""
    train = commands.add_parser("train", help="train the policy")
    add_config(train, _train)
    begin = train.add_mutually_exclusive_group()
    begin.add_argument(
        "--resume", action="store_true", help="continue from the newest whole checkpoint in training.output_dir"
    )
    begin.add_argument("--overwrite", action="store_true", help="delete the run in training.output_dir and start over")
    train.add_argument("--gpus", type=parse_gpus, metavar="LIST", help="GPUs such as 6,7; one learner process per GPU")
    train.add_argument("--nnodes", type=int, metavar="N", help="number of machines; torchrun's word, as the next two")
    train.add_argument("--node-rank", type=int, metavar="R", help="number of this machine, 0 to N - 1")
    train.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="address of machine 0, and a free port there")
    train.add_argument(
        "--wait-timeout", type=seconds, metavar="SECONDS", help="limit of the wait for healthy rollout servers"
    )
    train.add_argument("--server-pid", type=positive, metavar="PID", help="stop the wait when this process ends")
    engines = ("rollmatch", "swift")
    train.add_argument(
        "--engine", choices=engines, default=engines[0], help="learner; swift is ms-swift's own, for GRPO"
    )
    train.add_argument("--dry-run", action="store_true", help="print the command and its environment; start nothing")
    server_arguments.add_arguments(train)


def check_resume(words: Sequence[str]) -> None:
    """Answer a command line that names what to resume, as transformers' do. Errors: ``resume-of-path``."""
    for word, following in pairwise([*words, "-"] if words and words[0] in RESUMING else []):
        name, _, value = word.partition("=")
        given = value or following
        if name not in RESUMES or given.startswith("-") or given.endswith((".yaml", ".yml")) or Path(given).is_file():
            continue
        problem = f"is given {given}, and takes no path"
        remedy = (
            f"Leave {given} out: the newest whole checkpoint in training.output_dir is taken. To start a new run from "
            "its weights, name it in model.model."
        )
        raise LaunchError(problem, code="resume-of-path", key=name, remedy=remedy)


def _train(options: argparse.Namespace) -> int:
    from rollmatch.launch.learner import launch, shown_command, train
    from rollmatch.run.server_checks import WaitPolicy

    placement = Placement(gpus=options.gpus or (), nodes=nodes_of(options))
    options.overrides = [*options.overrides, *overrides_of(options)]  # the parser keeps its default
    if options.use_vllm_server:
        check_used(load_config(options.config, options.overrides))
    arguments = [part for override in options.overrides for part in ("--set", override)]
    arguments += [f"--{name}" for name in ("resume", "overwrite") if getattr(options, name)]
    wait = WaitPolicy(timeout_s=options.wait_timeout, server_pid=options.server_pid)
    if options.engine == "swift":
        from rollmatch.interop.swift_cli import train_by_swift

        _check_swift(placement.nodes)
        return train_by_swift(
            options.config, overrides=options.overrides, gpus=placement.gpus, wait=wait, dry_run=options.dry_run
        )
    if options.dry_run:
        load_config(options.config, options.overrides)
        print(shown_command(options.config, arguments, placement))
        return 0
    if placement.is_launched:
        return launch(options.config, arguments, placement, overrides=options.overrides, wait=wait)
    os.environ.update(visible(placement.gpus) if placement.gpus else {})
    return train(
        options.config, overrides=options.overrides, resume=options.resume, overwrite=options.overwrite, wait=wait
    )


def _check_swift(nodes: Nodes | None) -> None:
    if nodes is not None:
        problem = "is swift, and --nnodes is set"
        remedy = (
            "Print the command with --dry-run and without --nnodes; ms-swift reads the variables NNODES and NODE_RANK."
        )
        raise LaunchError(problem, code="swift-on-several-nodes", key="--engine", remedy=remedy)
