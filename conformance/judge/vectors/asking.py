"""The program under test: what it is sent and what it answers, a JSON object a line."""

import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from conformance.judge.vectors.stored import Vector

END_S = 5.0
"""How long a program may take to end after its last answer."""
STDERR_SHOWN = 4000
"""Last characters of its standard error that are kept."""


@dataclass(slots=True, kw_only=True)
class Answers:
    """What a program answered."""

    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the id of a vector."""
    problems: list[str] = field(default_factory=list)
    """Lines that are no answer to a vector."""
    ended: str = ""
    """Why there are no more answers; empty where all came."""
    first_unanswered: str = ""
    stderr: str = ""


def ask(command: Sequence[str], vectors: Sequence[tuple[str, Vector]], *, timeout_s: float) -> Answers:
    """Start the program once and send it all; ``vectors``: case and vector, ``timeout_s``: between two answers."""
    answers, wanted = Answers(), [vector.vector_id for _, vector in vectors]
    lines = [json.dumps({"id": v.vector_id, "case": case, "input": v.given}) + "\n" for case, v in vectors]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                encoding="utf-8",
                errors="replace",
            )
        except (OSError, IndexError) as error:
            answers.ended = f"COMMAND cannot be started: {error or 'it is empty'}"
        else:
            _talk(process, lines, wanted, answers, timeout_s)
        stderr.seek(0)
        answers.stderr = stderr.read()[-STDERR_SHOWN:]
    answers.first_unanswered = next((name for name in wanted if name not in answers.replies), "")
    return answers


def _talk(
    process: "subprocess.Popen[str]", lines: Sequence[str], wanted: Sequence[str], answers: Answers, timeout_s: float
) -> None:
    """Writing and reading each have a thread, so that neither side waits for a full pipe."""
    assert process.stdin is not None
    assert process.stdout is not None
    came: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_write, args=(process.stdin, lines), daemon=True).start()
    threading.Thread(target=_read, args=(process.stdout, came), daemon=True).start()
    try:
        while len(answers.replies) < len(wanted):
            line = came.get(timeout=timeout_s)
            if line is None:
                answers.ended = f"COMMAND ended with code {process.wait(timeout=END_S)}"
                return
            _take(line, wanted, answers)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_S)
    except queue.Empty:
        answers.ended = f"nothing came for {timeout_s:g} s (--timeout)"
    except subprocess.TimeoutExpired:
        answers.ended = "COMMAND closed its standard output"
    finally:
        process.kill()
        process.wait()


def _write(target: IO[str], lines: Sequence[str]) -> None:
    with suppress(BrokenPipeError):  # a program that ended; the reader sees it
        for line in lines:
            target.write(line)
            target.flush()
        target.close()


def _read(source: IO[str], came: "queue.SimpleQueue[str | None]") -> None:
    for line in source:
        came.put(line)
    came.put(None)


def _take(line: str, wanted: Sequence[str], answers: Answers) -> None:
    try:
        reply = json.loads(line)
    except ValueError:
        answers.problems.append(f"a line that is not JSON: {line.rstrip()}")
        return
    name = reply.get("id") if isinstance(reply, dict) else None
    if name not in wanted:
        answers.problems.append(f"an answer to nothing that was sent: {line.rstrip()}")
    elif name in answers.replies:
        answers.problems.append(f"a second answer to {name}: {line.rstrip()}")
    else:
        answers.replies[name] = reply
