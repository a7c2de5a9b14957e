"""``rollmatch-vectors run COMMAND``: prove an implementation in any language by portable vectors.

COMMAND reads one JSON object a line, {"id", "case", "input"}, from its standard input until it ends, and writes one a
line, {"id", "output"}, to its standard output, in any order. Inputs and outputs: docs/reference/vectors.md.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from conformance.judge.vectors.asking import Answers, ask
from conformance.judge.vectors.compare import difference
from conformance.judge.vectors.stored import FORMAT, Vector, VectorCase, read_cases, select

PASSED, MISSED, UNTESTABLE, BLOCKED = "pass", "must", "not-testable", "blocked-by"
CONFORMS, MISSES, INCOMPLETE, NOT_JUDGED = 0, 1, 3, 4
"""As those of the judge; 2 is wrong usage, 130 interrupted."""
MEANINGS = {
    CONFORMS: "every vector passed",
    MISSES: "a vector is missed",
    INCOMPLETE: "nothing is missed, but a case is not supported",
    NOT_JUDGED: "the command cannot be judged",
}
CODES = "exit codes:\n" + "\n".join(f"  {code}  {meaning}" for code, meaning in MEANINGS.items())
LISTED = 3
"""Missed vectors of a case that a terminal shows."""
SHOWN = 200
"""Characters of a difference that a terminal shows; the JSON report has all."""


def main(arguments: Sequence[str] | None = None, *, prog: str = "rollmatch-vectors") -> int:
    """Run the vectors, print and write. Returns the exit code that ``--help`` explains."""
    parser = make_parser(prog)
    options = parser.parse_args(arguments)
    try:
        cases = select(read_cases(), options.only)
    except ValueError as error:
        parser.error(f"--only: {error}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"--json: {options.json} cannot be written: there is no such directory")
    vectors = [(case, vector) for case in cases for vector in case.vectors]
    answers = ask(options.command, [(case.name, vector) for case, vector in vectors], timeout_s=options.timeout)
    entries = [entry_of(case, vector, answers, options.command, prog) for case, vector in vectors]
    code = exit_code(entries, answers)
    print_result(cases, entries, answers, code)
    if options.json is not None:
        report = {
            "format": FORMAT,
            "command": options.command,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        report |= {"exit_code": code, "meaning": MEANINGS[code], "problems": answers.problems, "stderr": answers.stderr}
        options.json.write_text(json.dumps(report | {"vectors": entries}, indent=1) + "\n", encoding="utf-8")
    return code


def run() -> NoReturn:
    """``main`` as a process of its own."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)


def make_parser(prog: str) -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, epilog=CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runner = parser.add_subparsers(required=True, metavar="run").add_parser(
        "run", epilog=CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runner.add_argument("--only", action="append", default=[], metavar="CASE|ID", help="can be repeated")
    runner.add_argument("--timeout", type=float, default=60.0, metavar="S", help="longest wait for the next answer")
    runner.add_argument("--json", type=Path, metavar="FILE", help="write every input, output and difference")
    runner.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="started once, without a shell")
    runner.usage = f"{prog} run [--only CASE|ID] [--timeout S] [--json FILE] COMMAND ..."
    return parser


def entry_of(case: VectorCase, vector: Vector, answers: Answers, command: Sequence[str], prog: str) -> dict[str, Any]:
    """A vector with its verdict, for the report."""
    state, reason = verdict_of(case, vector, answers)
    return {
        "id": vector.vector_id,
        "case": case.name,
        "shows": vector.shows,
        "clauses": case.clauses,
        "verdict": state,
        "reason": reason,
        "input": vector.given,
        "expected": vector.expected,
        "reply": answers.replies.get(vector.vector_id),
        "again": f"{prog} run --only {vector.vector_id} {shlex.join(command)}",
    }


def verdict_of(case: VectorCase, vector: Vector, answers: Answers) -> tuple[str, str]:
    """Verdict and reason."""
    reply = answers.replies.get(vector.vector_id)
    if reply is None:
        if vector.vector_id == answers.first_unanswered:
            return MISSED, f"no answer: {answers.ended}"
        return BLOCKED, answers.first_unanswered
    if "unsupported" in reply:
        return UNTESTABLE, f"not supported: {reply['unsupported']}"
    if "output" not in reply:
        return MISSED, f"an answer without output: {json.dumps(reply)}"
    reason = difference(vector.expected, reply["output"], tolerance=case.tolerance)
    return (MISSED, reason) if reason else (PASSED, "")


def exit_code(entries: Sequence[dict[str, Any]], answers: Answers) -> int:
    """What a run ends with.

    >>> exit_code([{"verdict": "pass"}], Answers(replies={"a": {}})), exit_code([], Answers(ended="no such file"))
    (0, 4)
    """
    states = {entry["verdict"] for entry in entries}
    if not answers.replies:
        return NOT_JUDGED
    if MISSED in states or answers.problems:
        return MISSES
    return INCOMPLETE if UNTESTABLE in states else CONFORMS


def print_result(cases: Sequence[VectorCase], entries: Sequence[dict[str, Any]], answers: Answers, code: int) -> None:
    """A line per case, then what it misses."""
    write = sys.stdout.write
    for case in cases:
        states = [entry["verdict"] for entry in entries if entry["case"] == case.name]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        write(f"{case.name:12} {counts}\n")
        missed = [entry for entry in entries if entry["case"] == case.name and entry["verdict"] == MISSED]
        for entry in missed[:LISTED]:
            write(f"\n{MISSED}: {entry['id']} {entry['shows']}\n    {entry['reason'][:SHOWN]}\n")
            write(f"    {', '.join(entry['clauses'])}\n    {entry['again']}\n\n")
        if len(missed) > LISTED:
            write(f"... and {len(missed) - LISTED} more of this case\n\n")
    write("".join(f"\n{problem[:SHOWN]}\n" for problem in answers.problems))
    if code == NOT_JUDGED:
        write(f"\n{answers.ended}\n{answers.stderr}")
    write(f"\n{code}: {MEANINGS[code]}\n")


if __name__ == "__main__":
    run()
