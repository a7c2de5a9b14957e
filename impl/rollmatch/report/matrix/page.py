"""Rows of scenarios -> one HTML file that needs nothing else; sortable, filterable, readable on a phone."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

MARKS = {"passed": "\u2713", "failed": "\u2717", "not-shown": "?", "known-gap": "\u2717", "not-testable": "?"}
"""Verdict -> its mark; a pending scenario has a dot, one that was not run a dash."""


def write_matrix_page(data: Mapping[str, Any], path: Path) -> Path:
    """Write the page; ``data`` is ``matrix.json``: written, rows of id, sentence, place, faults and cells, and such
    rows of the checks of rollout servers.
    """
    rows: Sequence[Mapping[str, object]] = data["rows"]
    checks: Sequence[Mapping[str, object]] = data.get("checks", ())
    subjects, servers = _subjects(rows), _subjects(checks)
    environment = Environment(
        loader=PackageLoader("rollmatch.report.matrix", "sheets"),
        autoescape=True,
        undefined=StrictUndefined,
    )
    text = environment.get_template("matrix.html").render(
        rows=rows,
        subjects=subjects,
        checks=checks,
        servers=servers,
        check_counts={server: _count(checks, server) for server in servers},
        capabilities=sorted({row["capability"] for row in (*rows, *checks)}),
        written=data["written"],
        counts={subject: _count(rows, subject) for subject in subjects},
        verdict_of=verdict_of,
        marks=MARKS,
    )
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8", newline="\n")
    unfinished.replace(path)
    return path


def verdict_of(row: Mapping[str, Any], subject: str) -> str:
    """Of one cell: that of the run, else ``pending`` or ``not-run``.

    >>> verdict_of({"cells": {}, "pending": "GRPO"}, "reference")
    'pending'
    """
    cell = row["cells"].get(subject)
    if cell is not None:
        return str(cell["verdict"])
    return "pending" if row["pending"] else "not-run"


def _subjects(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({subject for row in rows for subject in row["cells"]})


def _count(rows: Sequence[Mapping[str, object]], subject: str) -> dict[str, int]:
    verdicts = [verdict_of(row, subject) for row in rows]
    return {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
