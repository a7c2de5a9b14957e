"""``rollmatch import-config``: its options."""

import argparse
from pathlib import Path

from rollmatch.interop.import_config import import_config


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with its options."""
    parser = commands.add_parser("import-config", help="turn a GRPO configuration of TRL or ms-swift into ours")
    parser.set_defaults(command=import_config)
    text = "a YAML of TRL or ms-swift, or a command line after --, such as -- swift rlhf --rlhf_type grpo ..."
    parser.add_argument("source", nargs="+", metavar="SOURCE", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to this file instead of stdout")
