"""``rollmatch judge URL``: the command of the package ``rollmatch-conformance``, where it is installed."""

from collections.abc import Sequence
from importlib import import_module

from rollmatch.errors import LaunchError

COMMAND = "conformance.servers.command"


def judge(arguments: Sequence[str]) -> int:
    """Run ``rollmatch-judge`` with these words. Errors: ``judge-not-installed``."""
    try:
        command = import_module(COMMAND)
    except ModuleNotFoundError as error:
        if not COMMAND.startswith(str(error.name)):
            raise
        problem, remedy = "rollmatch-conformance is not installed", "Run: pip install rollmatch-conformance"
        raise LaunchError(problem, code="judge-not-installed", key="judge", remedy=remedy) from error
    return int(command.main(arguments, prog="rollmatch judge"))
