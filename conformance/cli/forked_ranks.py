"""Two ranks as torchrun starts them, but that fork from this process, and so have loaded what it has.

    python -m conformance.cli.forked_ranks SCRIPT ARGUMENT...
    python -m conformance.cli.forked_ranks -m MODULE ARGUMENT...

Each runs it with the ranks' environment; where one fails the other is ended, as by torchrun.
"""

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from conformance.cli.nursery import run
from rollmatch.cli.learner import set_environment
from rollmatch.startup import leave

NUM_RANKS = 2


def start(rank: int, place: dict[str, str], words: list[str]) -> int:
    """Its process id."""
    if process_id := os.fork():
        return process_id
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)} | place
    return leave(run(words))


def main(*words: str) -> NoReturn:
    """Ends with 1 where a rank has failed."""
    set_environment()
    from conformance.server.instance import free_port  # it loads torch

    num = str(NUM_RANKS)
    place = {"WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = {start(rank, place, list(words)) for rank in range(NUM_RANKS)}
    failed = False
    while running:
        ended, status = os.wait()
        running.discard(ended)
        if status and not failed:
            failed = True
            for process_id in running:
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGTERM)
    leave(int(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
