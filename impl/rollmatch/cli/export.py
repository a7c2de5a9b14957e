"""``rollmatch export``: its options."""

import argparse
from pathlib import Path

from rollmatch.model.source import DTYPES
from rollmatch.run.export import export


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with its options."""
    parser = commands.add_parser("export", help="write a run's policy as a model directory")
    parser.set_defaults(command=export)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write the model to")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: the newest whole one of the run")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--dtype", choices=DTYPES, help="default: that of the model that was trained; float32 loses nothing"
    )
    kind.add_argument("--adapter", action="store_true", help="write the adapter alone, as peft loads it")
    text = "generate the stored answers of the checkpoint's evaluation again, from OUT by transformers, and compare"
    parser.add_argument("--verify", action="store_true", help=text)
    text = "upload it to the Hugging Face hub; a new repository is private"
    parser.add_argument("--push", metavar="OWNER/NAME", help=text)
