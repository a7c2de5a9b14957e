"""``rollmatch vectors run COMMAND``: prove an implementation by portable vectors; ``answer``: be one.

The protocol: ``docs/reference/vectors.md``.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TextIO

from rollmatch.cli.judging import conformance_command


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command; it reads its own options."""
    proved = commands.add_parser("vectors", help="prove another implementation by portable vectors (same package)")
    proved.add_argument("words", nargs="...", metavar="run COMMAND ...", help="options: see rollmatch vectors --help")


def vectors(arguments: Sequence[str]) -> int:
    """``run`` by the package ``rollmatch-judge``; ``answer`` here. Errors: ``judge-not-installed``."""
    if list(arguments) == ["answer"]:
        return answer(sys.stdin, sys.stdout)
    return int(conformance_command("conformance.judge.vectors.command").main(arguments, prog="rollmatch vectors"))


def answer(requests: TextIO, replies: TextIO) -> int:
    """Answer one JSON object a line, until the input ends."""
    from rollmatch.interop import vector_answers

    for line in requests:
        vector = json.loads(line)
        output = vector_answers.answer(vector["case"], vector["input"])
        reply = {"output": output} if output is not None else {"unsupported": f"no case {vector['case']}"}
        replies.write(json.dumps({"id": vector["id"], **reply}) + "\n")
        replies.flush()
    return 0
