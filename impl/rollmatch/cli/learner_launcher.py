"""``rollmatch train CONFIG --gpus LIST``: one learner process per GPU, on these GPUs only.

With one GPU the learner is this process; with several they are torchrun's, and this process passes signals on. Group
ports are the servers' business: nothing here opens one.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rollmatch.cli.await_servers import Patience, await_servers
from rollmatch.cli.child import run_child, tell_command
from rollmatch.cli.gpus import visible
from rollmatch.config import check_files, load
from rollmatch.config.servers import uses_servers


def learner_command(path: str, arguments: Sequence[str], *, num_processes: int) -> list[str]:
    """The command line of the learner; ``arguments`` are those after the YAML.

    >>> learner_command("run.yaml", ["--resume"], num_processes=2)[1:]
    ['--standalone', '--nproc-per-node', '2', '-m', 'rollmatch', 'train', 'run.yaml', '--resume']
    """
    learner = ["-m", "rollmatch", "train", path, *arguments]
    if num_processes == 1:
        return [sys.executable, *learner]
    torchrun = Path(sys.executable).with_name("torchrun")
    return [str(torchrun), "--standalone", "--nproc-per-node", str(num_processes), *learner]


def tell(path: str, arguments: Sequence[str], *, gpus: Sequence[str]) -> str:
    """What would be started, as one would type it."""
    return tell_command(learner_command(path, arguments, num_processes=len(gpus)), visible(gpus))


def launch(
    path: str,
    arguments: Sequence[str],
    *,
    gpus: Sequence[str],
    overrides: Sequence[str] = (),
    patience: Patience,
) -> int:
    """Check and wait here, once, then start the ranks. Returns the learner's exit code."""
    config = load(path, overrides)
    check_files(config)
    if uses_servers(config):
        await_servers(config, patience, gpus=gpus)
    environment = dict(visible(gpus))
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun would warn and set it
        environment["OMP_NUM_THREADS"] = "1"
    return run_child(learner_command(path, arguments, num_processes=len(gpus)), environment)
