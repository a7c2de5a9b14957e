"""``rollmatch page`` and ``rollmatch compare``."""

import argparse
from pathlib import Path


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both commands with their options."""
    page = commands.add_parser("page", help="write the page of a run that is under way, or was cut off")
    page.add_argument("run", type=Path, metavar="RUN", help="run directory")
    page.set_defaults(command=_page)
    compare = commands.add_parser("compare", help="write one page about several runs")
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories, two to six")
    compare.add_argument("--out", type=Path, default=Path("compare.html"), metavar="FILE", help="default: compare.html")
    compare.set_defaults(command=_compare)


def _page(options: argparse.Namespace) -> None:
    from rollmatch.report.page import write_page

    print(write_page(options.run))


def _compare(options: argparse.Namespace) -> None:
    from rollmatch.report.compare import write_comparison

    print(write_comparison(options.runs, options.out))
