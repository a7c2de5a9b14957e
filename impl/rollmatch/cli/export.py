"""``rollmatch export``: its options."""

import argparse
from pathlib import Path

from rollmatch.run.export import DTYPES, export


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with its options."""
    parser = commands.add_parser("export", help="write a run's policy as a model directory")
    parser.set_defaults(command=export)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write the model to")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: the newest whole one of the run")
    parser.add_argument("--dtype", choices=DTYPES, help="default: that of the model that was trained")
    text = "upload it to the Hugging Face hub; a new repository is private"
    parser.add_argument("--push", metavar="OWNER/NAME", help=text)
