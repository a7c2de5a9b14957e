"""``rollmatch schema``: the JSON Schema of the YAML, for editors."""

import argparse
import json
from pathlib import Path

from rollmatch.config import json_schema
from rollmatch.errors import LaunchError


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with its options."""
    parser = commands.add_parser("schema", help="print the JSON Schema of the YAML, for editors")
    parser.set_defaults(command=write_schema)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to this file instead of stdout")


def write_schema(options: argparse.Namespace) -> None:
    """Write or print the schema. Errors: ``output-not-writable``."""
    text = json.dumps(json_schema(), indent=2) + "\n"
    if options.out is None:
        print(text, end="")
        return
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        problem, remedy = str(error.strerror), "Name a file in a directory that exists."
        raise LaunchError(problem, code="output-not-writable", key=str(options.out), remedy=remedy) from error
