"""``rollmatch eval``: its options."""

import argparse
from pathlib import Path

from rollmatch.cli.numbers import positive
from rollmatch.run.evaluate import SPLITS, evaluate


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with its options."""
    parser = commands.add_parser(
        "eval", help="judge a run's policy, or a model, on one split: COCO AP and F1, rewards, or loss of true answers"
    )
    parser.set_defaults(command=evaluate)
    parser.add_argument("subject", metavar="CONFIG|RUN", help="YAML file: its model; run directory: its newest policy")
    parser.add_argument("--split", choices=SPLITS, default="val", help="default: val")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="of the run; default: the newest whole one")
    parser.add_argument("--limit", type=positive, metavar="N", help="evaluate the first N samples")
    parser.add_argument("--skip-bad", action="store_true", help="leave out bad samples, and name them")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: eval-SPLIT-STEP in the run directory")
    text = "override one key of the YAML; can be repeated"
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b=VALUE", help=text)
