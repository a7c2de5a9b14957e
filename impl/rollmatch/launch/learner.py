"""``rollmatch train``: check everything, then train in this process, or in one process per GPU by torchrun.

Import nothing heavy: some variables only count if they are set before torch and vLLM load.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollmatch.config import RunConfig, load_config, resolved_yaml
from rollmatch.config.effective import enforce_eager, rollout_backend
from rollmatch.config.servers import uses_servers
from rollmatch.data.checked import as_variables
from rollmatch.dialects.calls import BackgroundCall
from rollmatch.dialects.http import raise_failures
from rollmatch.launch.nodes import Placement, check_endpoint, interface_variables
from rollmatch.launch.processes import PYTHON, end_with_parent, run_child, shell_line, visible
from rollmatch.model.source import with_local_model
from rollmatch.records import Sample
from rollmatch.run.directory import check_unchanged, open_run_directory
from rollmatch.run.machine import check_engine, has_gpu, set_environment
from rollmatch.run.preflight import load_checked
from rollmatch.run.server_checks import (
    WaitPolicy,
    check_servers_reachable,
    learner_gpus,
    wait_for_notice,
    wait_for_servers,
)
from rollmatch.run.strategy_check import check_strategy
from rollmatch.startup import loading

if TYPE_CHECKING:  # seconds to load
    from rollmatch.run.lifecycle import Prepared

SERVERS_NOTICE = "ROLLMATCH_SERVERS_NOTICE"
"""Environment variable of the ranks: the file that the launcher writes once it has found the servers right."""


def train(
    path: str,
    *,
    overrides: Sequence[str],
    resume: bool,
    overwrite: bool,
    wait: WaitPolicy,
) -> int:
    """Run a training from its YAML. Returns 0, or 128 + the signal that ended it early."""
    config = load_config(path, overrides)
    return train_config(config, config_path=path, resume=resume, overwrite=overwrite, wait=wait)


def train_config(
    config: RunConfig, *, config_path: str, resume: bool, overwrite: bool, wait: WaitPolicy | None = None
) -> int:
    """Run a training; ``config_path`` is for the journal. Returns as ``train``."""
    config = with_local_model(config)
    train_samples, val_samples = load_checked(config)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if "LOCAL_RANK" in os.environ:
        end_with_parent()  # torchrun gives each rank a session of its own: killed itself, it would leave them running
    check_strategy(config, learner_world_size=num_ranks)
    check_servers_reachable(config)
    set_environment(eager=enforce_eager(config, on_gpu=has_gpu()))
    prepared: BackgroundCall[Prepared] | None = None
    if uses_servers(config):
        prepared = BackgroundCall(partial(_prepare, config, train_samples, val_samples, with_policy=True))
        check = partial(raise_failures, [prepared])
        if notice := os.environ.get(SERVERS_NOTICE):
            wait_for_notice(Path(notice), check)
        else:
            wait_for_servers(config, wait or WaitPolicy(), gpus=learner_gpus(), check=check)
    else:
        check_engine(rollout_backend(config))
    if os.environ.get("RANK", "0") != "0":  # rank 0 locks the directory and names the checkpoint
        ready = prepared.result() if prepared else _prepare(config, train_samples, val_samples)
        return _run(config, ready, config_path=config_path, checkpoint=None)
    with open_run_directory(Path(config.training.output_dir), resume=resume, overwrite=overwrite) as directory:
        if directory.checkpoint is not None:
            check_unchanged(directory.checkpoint, resolved_yaml(config))
        elif resume:
            print(f"nothing to resume: {directory.path} holds no checkpoint; the run begins at step 0", flush=True)
        ready = prepared.result() if prepared else _prepare(config, train_samples, val_samples)
        return _run(config, ready, config_path=config_path, checkpoint=directory.checkpoint)


def _prepare(
    config: RunConfig, train_samples: Sequence[Sample], val_samples: Sequence[Sample], *, with_policy: bool = False
) -> "Prepared":
    """What needs neither servers nor other ranks; ``with_policy``: also the policy, where no launcher splits it.

    Loading torch and transformers takes seconds, and a large policy minutes.
    """
    with loading():
        from rollmatch.run.lifecycle import prepare
    is_alone = "LOCAL_RANK" not in os.environ
    return prepare(config, train_samples, val_samples, with_policy=with_policy and is_alone)


def _run(config: RunConfig, prepared: "Prepared", *, config_path: str, checkpoint: Path | None) -> int:
    from rollmatch.run.lifecycle import run

    return run(config, prepared, config_path=config_path, checkpoint=checkpoint)


def learner_command(path: str, arguments: Sequence[str], placement: Placement) -> list[str]:
    """The command line of the learner; ``arguments`` are those after the YAML.

    >>> command = learner_command("run.yaml", ["--resume"], Placement(gpus=("0", "1")))
    >>> command[1:5]
    ['--standalone', '--nproc-per-node', '2', '--no-python']
    >>> command[6:]
    ['-u', '-P', '-m', 'rollmatch', 'train', 'run.yaml', '--resume']
    """
    learner = [*PYTHON, "-m", "rollmatch", "train", path, *arguments]
    if not placement.is_launched:
        return learner
    torchrun = Path(sys.executable).with_name("torchrun")
    where = ["--standalone"] if placement.nodes is None else placement.nodes.torchrun_words
    unbuffered = ["--no-python", learner[0], "-u", *learner[1:]]  # as torchrun starts Python itself
    return [str(torchrun), *where, "--nproc-per-node", str(placement.num_processes), *unbuffered]


def shown_command(path: str, arguments: Sequence[str], placement: Placement) -> str:
    """What would be started, as one would type it."""
    return shell_line(learner_command(path, arguments, placement), visible(placement.gpus or ("0",)))


def launch(
    path: str,
    arguments: Sequence[str],
    placement: Placement,
    *,
    overrides: Sequence[str] = (),
    wait: WaitPolicy,
) -> int:
    """Check here, once, and start this machine's ranks, which load while servers are waited for here.

    Returns the learner's exit code.
    """
    config, nodes = with_local_model(load_config(path, overrides)), placement.nodes
    environment = as_variables(load_checked(config))
    check_strategy(config, learner_world_size=placement.world_size)
    environment |= visible(placement.gpus) if placement.gpus else {}
    if nodes is not None:
        check_servers_reachable(config, num_nodes=nodes.nnodes)
        environment |= interface_variables(check_endpoint(nodes))
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun would warn and set it
        environment["OMP_NUM_THREADS"] = "1"
    command = learner_command(path, arguments, placement)
    if not uses_servers(config):
        return run_child(command, environment)
    with tempfile.TemporaryDirectory(prefix="rollmatch-") as folder:
        notice = Path(folder) / "servers-are-there"
        waiting = BackgroundCall(partial(_wait_and_tell, config, wait, placement.gpus, notice))
        environment[SERVERS_NOTICE] = str(notice)
        check = partial(raise_failures, [waiting])
        code = run_child(command, environment, check=check, has_begun=waiting.is_done)
    if code > 128 and not waiting.is_done():
        print(f"rollmatch: stopped by signal {code - 128} while it waited for servers", file=sys.stderr)
    return code


def _wait_and_tell(config: RunConfig, wait: WaitPolicy, gpus: Sequence[str], notice: Path) -> None:
    wait_for_servers(config, wait, gpus=gpus)
    notice.touch()
