"""A process in the place of a vLLM engine's; a file of its own, so that a spawned one loads nothing else."""

import os
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

LIMIT_S = 60


def engine_process(barrier: Barrier, sender: Connection) -> None:
    """Ready when all have started; sends its GPUs."""
    barrier.wait(timeout=LIMIT_S)
    sender.send(os.environ["CUDA_VISIBLE_DEVICES"])
