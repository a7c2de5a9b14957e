"""Asks a server for its health over and over, from a process of its own: waits of a busy test are not the server's."""

import http.client
import json
import select
import subprocess
import sys
import time
from contextlib import contextmanager

PAUSE_S = 0.02


@contextmanager
def pinging(port):
    """Ping while this lasts; what comes out is [n] seconds that each answer took, filled in at the end.

    A session of its own has its own share of the processor, as a monitor on another machine would have.
    """
    command = [sys.executable, __file__, str(port)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "begun\n"
    waits = []
    try:
        yield waits
    finally:
        waits += json.loads(process.communicate("end\n", timeout=60)[0])
        assert process.returncode == 0


def ping(port):
    waits = []
    print("begun", flush=True)  # noqa: T201
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health/")
        assert connection.getresponse().status == 200
        connection.close()
        waits.append(time.perf_counter() - began)
    print(json.dumps(waits))  # noqa: T201


if __name__ == "__main__":
    ping(int(sys.argv[1]))
