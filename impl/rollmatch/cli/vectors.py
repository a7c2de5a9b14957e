"""``rollmatch vectors run COMMAND``: prove an implementation by portable vectors; ``answer``: be one.

The protocol: ``docs/reference/vectors.md``.
"""

import json
import sys
from collections.abc import Sequence
from typing import TextIO

from rollmatch.cli.judging import conformance_command


def vectors(arguments: Sequence[str]) -> int:
    """``run`` by the package ``rollmatch-conformance``; ``answer`` here. Errors: ``judge-not-installed``."""
    if list(arguments) == ["answer"]:
        return answer(sys.stdin, sys.stdout)
    return int(conformance_command("conformance.vectors.command").main(arguments, prog="rollmatch vectors"))


def answer(requests: TextIO, replies: TextIO) -> int:
    """Answer one JSON object a line, until the input ends."""
    from rollmatch.cli import vector_answers

    for line in requests:
        vector = json.loads(line)
        output = vector_answers.answer(vector["case"], vector["input"])
        reply = {"output": output} if output is not None else {"unsupported": f"no case {vector['case']}"}
        replies.write(json.dumps({"id": vector["id"], **reply}) + "\n")
        replies.flush()
    return 0
