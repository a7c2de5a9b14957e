"""Commands of the package ``rollmatch-judge``, where it is installed: judge, judge-trainer, vectors."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from rollmatch.errors import LaunchError


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both commands; they read their own options."""
    judged = commands.add_parser("judge", help="judge a running rollout server (package rollmatch-judge)")
    judged.add_argument("words", nargs="...", metavar="URL ...", help="options: see rollmatch judge --help")
    judged = commands.add_parser("judge-trainer", help="judge a trainer by what it does to a server (same package)")
    judged.add_argument("words", nargs="...", metavar="... -- COMMAND", help="see rollmatch judge-trainer --help")


def judge(arguments: Sequence[str]) -> int:
    """Run ``rollmatch-judge`` with these words. Errors: ``judge-not-installed``."""
    return int(conformance_command("conformance.judge.servers.command").main(arguments, prog="rollmatch judge"))


def judge_trainer(arguments: Sequence[str]) -> int:
    """Run ``rollmatch-judge-trainer`` with these words. Errors: ``judge-not-installed``."""
    return int(
        conformance_command("conformance.judge.trainers.command").main(arguments, prog="rollmatch judge-trainer")
    )


def conformance_command(name: str) -> ModuleType:
    """The module of a command of ``rollmatch-judge``. Errors: ``judge-not-installed``."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(str(error.name)):
            raise
        problem, remedy = "rollmatch-judge is not installed", "In rollmatch's clone: pip install ./conformance/judge"
        key = name.split(".")[2]
        raise LaunchError(problem, code="judge-not-installed", key=key, remedy=remedy) from error
