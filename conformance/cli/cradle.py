"""A test worker that forks from the process that has loaded everything; xdist starts this in place of a Python.

``conformance.workers`` names the command, by which ``main`` is given ``RUN TEST... -u -c CODE``; without code it is no
worker but keeps that process until its input ends.
"""

import os
import sys
from pathlib import Path

from conformance.cli.forked import COLLECT, LEARNER, Forked, keep


def main(run: str, *words: str) -> int:
    """Stays as long as the worker does, and ends as it did; holds none of its streams open."""
    os.environ["PYTEST_XDIST_TESTRUNUID"] = run
    tests, code = (words[: words.index("-u")], words[words.index("-c") :]) if "-u" in words else (words, ())
    loaded = (*LEARNER, COLLECT, *tests) if tests else LEARNER
    if not code:
        keep(LEARNER)
        keep(loaded)
        sys.stdin.read()
        return 0
    worker = Forked(code, loaded=loaded, log=None, environment=dict(os.environ), folder=Path.cwd())
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    return worker.wait()
