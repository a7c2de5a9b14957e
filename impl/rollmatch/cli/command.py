"""A command that this process may become."""

import os
import shutil
from dataclasses import dataclass
from typing import NoReturn

from rollmatch.cli.child import tell_command
from rollmatch.errors import LaunchError


class SwiftMissing(LaunchError):
    """``engine: swift`` needs ms-swift's command."""

    code = "swift-missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What would be run, and with what added to the environment."""

    words: tuple[str, ...]
    environment: dict[str, str]

    def __str__(self) -> str:
        return tell_command(self.words, dict(sorted(self.environment.items())))


def become(command: Command) -> NoReturn:
    """Replace this process; what the user has set in the environment stays. Errors: ``SwiftMissing``."""
    program = shutil.which(command.words[0])
    if program is None:
        problem, remedy = f"{command.words[0]} is not installed", "Install ms-swift: pip install rollmatch[swift]."
        raise SwiftMissing(problem, key="custom.extra.rollout_server.engine", remedy=remedy)
    environment = os.environ | {
        n: v for n, v in command.environment.items() if n not in os.environ or n == "CUDA_VISIBLE_DEVICES"
    }
    os.execve(program, command.words, environment)
