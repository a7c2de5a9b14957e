"""A test worker that forks from the process that has loaded everything; xdist starts this in place of a Python.

``conformance.workers`` names the command, by which ``main`` is given ``RUN -u -c CODE``; ``RUN`` alone is no worker but
keeps that process until its input ends.
"""

import os
import sys
from pathlib import Path

from conformance.launch.forked import LEARNER, Forked, keep


def main(run: str, *words: str) -> int:
    """Stays as long as the worker does, and ends as it did; holds none of its streams open."""
    os.environ["PYTEST_XDIST_TESTRUNUID"] = run
    if not words:
        keep(LEARNER)
        sys.stdin.read()
        return 0
    code = words[words.index("-c") :]
    worker = Forked(code, loaded=LEARNER, log=None, environment=dict(os.environ), folder=Path.cwd())
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    return worker.wait()
