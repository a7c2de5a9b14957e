"""Free ports of this machine."""

import os
import random
import socket

_GIVEN: set[int] = set()


def free_port() -> int:
    """Outside the range from which outgoing connections take theirs, never twice, and no other test worker's.

    Not drawn from ``random``: a trainer seeds it, and two workers with one seed would draw the same ports.
    """
    worker, num_workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    while True:
        port = 20000 + random.SystemRandom().randrange(10000 // int(num_workers)) * int(num_workers) + int(worker[2:])
        with socket.socket() as probe:
            if port not in _GIVEN and probe.connect_ex(("127.0.0.1", port)):
                _GIVEN.add(port)
                return port
