"""A rank that torchrun starts (``PYTHON_EXEC``), forked from the process that has loaded everything.

    python -m conformance.cli.relay WORD...

It is what torchrun sees of the rank: it hands signals on, and ends as the rank does.
"""

import os
import signal
import sys
from pathlib import Path

from conformance.cli.forked import LEARNER, Forked, this_run

HANDED_ON = (signal.SIGINT, signal.SIGTERM)


def main(*words: str) -> int:
    """The rank's exit code, as a shell tells it."""
    rank = Forked(words[words.index("-m") :], loaded=LEARNER, log=None, environment=dict(os.environ))
    for number in HANDED_ON:
        signal.signal(number, lambda number, frame: rank.send_signal(number))
    code = rank.wait()
    return code if code >= 0 else 128 - code


def write_relay(folder: Path) -> dict[str, str]:
    """The environment in which torchrun starts such ranks."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m conformance.cli.relay "$@"\n')
    program.chmod(0o755)
    return {"PYTHON_EXEC": str(program), "PYTEST_XDIST_TESTRUNUID": this_run()}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
