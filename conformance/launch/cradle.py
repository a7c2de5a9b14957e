"""A test worker that forks from the process that has loaded everything; xdist starts this in place of a Python.

python -m conformance.launch.cradle RUN -u -c CODE
python -m conformance.launch.cradle RUN             # no worker: keeps that process until its input ends
"""

import os
import sys

from conformance.launch.forked import LEARNER, Forked, keep


def main(run: str, *words: str) -> int:
    """Stays as long as the worker does, and ends as it did; holds none of its streams open."""
    os.environ["PYTEST_XDIST_TESTRUNUID"] = run
    if not words:
        keep(LEARNER)
        sys.stdin.read()
        return 0
    worker = Forked(words[words.index("-c") :], loaded=LEARNER, log=None, environment=dict(os.environ))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    return worker.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
