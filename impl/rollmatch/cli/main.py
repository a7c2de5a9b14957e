"""``rollmatch``: check, plan, train, serve, up, schema, doctor. Heavy packages are imported only by what needs them."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import NoReturn

from rollmatch import __version__
from rollmatch.cli import (
    add_coords,
    check,
    convert,
    doctor,
    evaluate,
    export,
    import_config,
    judging,
    page,
    plan,
    schema,
    serve,
    train,
    up,
    vectors,
    vllm_serve,
)
from rollmatch.cli.train import check_resume
from rollmatch.config.layers import SHORT, find_places, full_key
from rollmatch.data import BadSamples
from rollmatch.errors import ErrorList, RollmatchError
from rollmatch.run.storage import storage_error
from rollmatch.startup import run_process

TRACEBACK_VARIABLE = "ROLLMATCH_TRACEBACK"
"""Set to 1, it shows where in the code an error was raised."""
PACKAGED = {"judge": judging.judge, "judge-trainer": judging.judge_trainer, "vectors": vectors.vectors}
"""Commands of a package of its own, with its own options."""
COMMANDS = (
    check,
    plan,
    train,
    serve,
    up,
    vllm_serve,
    page,
    evaluate,
    export,
    add_coords,
    convert,
    import_config,
    judging,
    vectors,
    schema,
    doctor,
)
"""In the order of ``--help``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, or 1 after printing problems to stderr; wrong usage exits with 2."""
    try:
        words = sys.argv[1:] if arguments is None else list(arguments)
        if words and (packaged := PACKAGED.get(words[0])):
            return packaged(words[1:])
        check_resume(words)
        options = _parse(words)
        return int(options.command(options) or 0)
    except Exception as error:
        named = error if isinstance(error, RollmatchError) else storage_error(error)
        if named is None or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        written = _places_of(words)
        text = format_error(named, {full_key(key): place for key, place in written.items()})
        print(_in_short(text, written), file=sys.stderr)
        return 1


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Wrong usage ends the process, also keys as Hydra and ms-swift take them."""
    parser = make_parser()
    options, others = parser.parse_known_args(words)
    if others:
        has_key = any("." in word.partition("=")[0] for word in others)
        hint = "; write a key of the YAML as --set KEY=VALUE" if has_key else ""
        parser.error(f"unrecognized arguments: {' '.join(others)}{hint}")
    return options


def _places_of(words: Sequence[str]) -> Mapping[str, str]:
    """Where the keys of the YAML on a command line are set, by the YAML or by --set, which wins."""
    files = [word for word in words if word.endswith((".yaml", ".yml"))]
    places = find_places(files[0]) if files else {}
    for word in [word.removeprefix("--set=") for word in words if "=" in word]:
        key = word.partition("=")[0]
        below = f"{full_key(key)}."
        places = {known: place for known, place in places.items() if not f"{full_key(known)}.".startswith(below)}
        places |= {key: f"--set {key}"}
    return places


def _in_short(text: str, written: Mapping[str, str]) -> str:
    """A message with the short names of sections that the configuration writes by these."""
    for short in SHORT.keys() & {key.partition(".")[0] for key in written}:
        if not any(f"{key}.".startswith(f"{SHORT[short]}.") for key in written):
            text = re.sub(rf"\b{re.escape(SHORT[short])}\b", short, text)
    return text


def run() -> NoReturn:
    """``main`` as a process of its own."""
    run_process(main, with_traceback=os.environ.get(TRACEBACK_VARIABLE) == "1")


def format_error(error: RollmatchError, places: Mapping[str, str] = MappingProxyType({})) -> str:
    """An error as a numbered list of problems, each with its remedy; ``places``: key -> file and line."""
    shown, num_hidden = _unfold(error)
    num_problems = len(shown) + num_hidden
    lines = [f"rollmatch: {num_problems} problem{'s' * (num_problems != 1)}"]
    lines += [
        f"{number:3}. {_lines_of(problem, _place_of(problem.key, places))}"
        for number, problem in enumerate(shown, start=1)
    ]
    if num_hidden:
        lines.append(f"     ... and {num_hidden} more")
    return "\n".join(lines)


def _place_of(key: str, places: Mapping[str, str]) -> str:
    """Where a key is set, or else the section or list that it belongs into.

    >>> _place_of("training.seed.0", {"training": "a.yaml:1", "training.seed": "a.yaml:2"})
    'a.yaml:2'
    """
    while key and key not in places:
        key = key.rpartition(".")[0]
    return places.get(key, "")


def _lines_of(error: RollmatchError, place: str) -> str:
    where = f"{error.key}: " if error.key else ""
    remedy = f"\n     {error.remedy}" if error.remedy else ""
    return f"[{error.code}] {where}{error.problem}{remedy}" + (f"\n     {place}" if place else "")


def _unfold(error: RollmatchError) -> tuple[list[RollmatchError], int]:
    """The single errors inside, and how many of a data set's are left out."""
    if isinstance(error, BadSamples):
        return error.shown, error.num_hidden
    if not isinstance(error, ErrorList):
        return [error], 0
    parts = [_unfold(part) for part in error.errors]
    return [single for singles, _ in parts for single in singles], sum(num_hidden for _, num_hidden in parts)


@cache
def make_parser() -> argparse.ArgumentParser:
    """Every command with its options, made once in a process: it takes 10 ms, and tests call thousands of commands."""
    parser = argparse.ArgumentParser(prog="rollmatch", description="Train a model on its own rollouts.")
    parser.add_argument("--version", action="version", version=f"rollmatch {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_command(commands)
    return parser
