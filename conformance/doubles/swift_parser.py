"""Argument parsers of ms-swift, as ``fixtures/swift/record.py`` recorded them, and its command where no GPU is."""

import argparse
import json
import os
from functools import cache
from pathlib import Path

from transformers.hf_argparser import string_to_bool

from conformance.judge.servers.known import write_swift_command
from conformance.tools.outside_tools import python_of

FOLDER = Path(__file__).parents[2] / "fixtures/swift"


KINDS = {"int": int, "float": float, "str": str, "bool": string_to_bool}


@cache
def recorded() -> dict:
    return json.loads((FOLDER / "options.json").read_text())


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of ``rollout`` or ``rlhf``; no option may be shortened."""
    parser = argparse.ArgumentParser(prog=f"swift {command}", allow_abbrev=False, exit_on_error=False)
    for argument in recorded()[command]:
        if argument.get("nargs") == 0:
            parser.add_argument(*argument["flags"], action="store_true", default=argparse.SUPPRESS)
        else:
            kind = KINDS[argument["kind"]]
            choices = argument.get("choices") and {str(choice): choice for choice in argument["choices"]}
            parser.add_argument(
                *argument["flags"],
                nargs=argument.get("nargs"),
                type=str if choices else kind,
                choices=choices,
                default=argparse.SUPPRESS,
            )
    return parser


def parse(command: str, words: list[str]) -> dict:
    """What ms-swift would understand. Raises AssertionError for what it would not."""
    try:
        known, unknown = parser_of(command).parse_known_args(words)
    except argparse.ArgumentError as error:
        raise AssertionError(f"swift {command} refuses: {error}") from error
    assert not unknown, f"swift {command} does not know {unknown}"
    return vars(known)


def put_on_the_path(folder, monkeypatch) -> None:
    """For this test; a learner keeps the ``PYTHONPATH`` that it was started with, for our rewards."""
    (folder / "bin").mkdir()
    commands = write_swift_command(folder / "bin", python_of("swift"))
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
