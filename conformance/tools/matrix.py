"""What a run has shown, as the living matrix: one page, its data, and a badge."""

import json
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conformance.tools.binding import map_tests, read_claims
from conformance.tools.evidence import Evidence, verdict_of
from conformance.tools.faults import read_faults
from conformance.tools.specification import read_specification

MARKS = {"passed": "\u2713", "failed": "\u2717", "not-shown": "?", "known-gap": "\u2717", "not-testable": "?"}
"""Verdict -> its mark; a scenario that was not run has a dash."""


def write_matrix(folder: Path, evidence: Evidence, *, subject: str, checks: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write ``matrix.json``, ``matrix.html`` and ``badge.json``; keep cells of other subjects in these files.

    ``checks``: rows of the checks of rollout servers, with a cell for each server.
    """
    path = folder / "matrix.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    cells = {row["id"]: row["cells"] for row in old["rows"]}
    rows = _make_rows(evidence, subject=subject, cells=cells)
    data = {"written": time.strftime("%Y-%m-%d %H:%M"), "rows": rows, "checks": list(checks)}
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "matrix.html").write_text(_page_of(data), encoding="utf-8")
    (folder / "badge.json").write_text(json.dumps(make_badge(rows, subject)) + "\n", encoding="utf-8")


def _page_of(data: Mapping[str, Any]) -> str:
    """One page that needs nothing else; sortable, filterable, readable on a phone."""
    loader = FileSystemLoader(Path(__file__).parent)
    sheet = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("matrix.html")
    rows, checks = data["rows"], data["checks"]
    subjects, servers = _subjects(rows), _subjects(checks)
    return sheet.render(
        rows=rows,
        subjects=subjects,
        checks=checks,
        servers=servers,
        check_counts={server: _count(checks, server) for server in servers},
        capabilities=sorted({row["capability"] for row in (*rows, *checks)}),
        written=data["written"],
        counts={subject: _count(rows, subject) for subject in subjects},
        verdict_of=_shown_verdict,
        marks=MARKS,
    )


def _subjects(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({subject for row in rows for subject in row["cells"]})


def _shown_verdict(row: Mapping[str, Any], subject: str) -> str:
    return str(row["cells"].get(subject, {}).get("verdict", "not-run"))


def _count(rows: Sequence[Mapping[str, Any]], subject: str) -> Counter[str]:
    return Counter(_shown_verdict(row, subject) for row in rows)


def make_badge(rows: list[dict[str, Any]], subject: str) -> dict[str, Any]:
    """As shields.io reads it.

    >>> make_badge([{"cells": {"me": {"verdict": "passed"}}}, {"cells": {}}], "me")["message"]
    '1 of 2 scenarios'
    """
    verdicts = [row["cells"].get(subject, {}).get("verdict", "") for row in rows]
    color = "red" if "failed" in verdicts else "brightgreen" if set(verdicts) == {"passed"} else "yellow"
    message = f"{verdicts.count('passed')} of {len(verdicts)} scenarios"
    return {"schemaVersion": 1, "label": f"conformance: {subject}", "message": message, "color": color}


def _make_rows(evidence: Evidence, *, subject: str, cells: dict[str, Any]) -> list[dict[str, Any]]:
    tests, faults = map_tests(read_claims()), read_faults()
    return [
        {
            "id": each,
            "capability": each.partition("/")[0],
            "name": each.partition("/")[2].replace("-", " "),
            "place": rule.place,
            "sentence": rule.text,
            "tests": tests.get(each, []),
            "faults": sorted(fault.fault_id for fault in faults if each in fault.rules),
            "cells": cells.get(each, {}) | _make_cell(evidence, each, subject),
        }
        for each, rule in read_specification().scenarios.items()
    ]


def _make_cell(evidence: Evidence, scenario_id: str, subject: str) -> dict[str, Any]:
    outcomes = evidence.outcomes.get(scenario_id)
    if outcomes is None:
        return {}
    cell = {
        "verdict": verdict_of(outcomes.values()),
        "date": time.strftime("%Y-%m-%d"),
        "device": platform.processor() or platform.machine(),
        "seconds": round(sum(evidence.seconds.get(test, 0.0) for test in outcomes), 2),
        "evidence": [f"{outcome} {test}" for test, outcome in outcomes.items()],
    }
    return {subject: cell}
