"""What a run has shown, as the living matrix: one page, its data, and a badge."""

import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.harness.binding.binding import bind, place_of
from conformance.harness.binding.claim import read_claims
from conformance.harness.binding.evidence import Evidence, verdict_of
from conformance.harness.binding.register import load_register
from conformance.harness.catalogue import Catalogue
from conformance.harness.faults.ledger import faults_by_test, load_ledger
from rollmatch.report.matrix.page import write_matrix_page


def write_matrix(
    folder: Path,
    evidence: Evidence,
    *,
    subject: str,
    catalogue: Catalogue,
    checks: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write ``matrix.json``, ``matrix.html`` and ``badge.json``; cells of other subjects that stand there are kept.

    ``checks``: rows of what rollout servers are asked, with a cell for each server.
    """
    path = folder / "matrix.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    cells = {row["id"]: row["cells"] for row in old["rows"]}
    rows = _make_rows(evidence, subject=subject, catalogue=catalogue, cells=cells)
    data = {"written": time.strftime("%Y-%m-%d %H:%M"), "rows": rows, "checks": list(checks)}
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_matrix_page(data, folder / "matrix.html")
    (folder / "badge.json").write_text(json.dumps(make_badge(rows, subject)) + "\n", encoding="utf-8")


def make_badge(rows: list[dict[str, Any]], subject: str) -> dict[str, Any]:
    """As shields.io reads it.

    >>> make_badge([{"cells": {"me": {"verdict": "passed"}}}, {"cells": {}}], "me")["message"]
    '1 of 2 scenarios'
    """
    verdicts = [row["cells"].get(subject, {}).get("verdict", "") for row in rows]
    color = "red" if "failed" in verdicts else "brightgreen" if set(verdicts) == {"passed"} else "yellow"
    message = f"{verdicts.count('passed')} of {len(verdicts)} scenarios"
    return {"schemaVersion": 1, "label": f"conformance: {subject}", "message": message, "color": color}


def _make_rows(
    evidence: Evidence, *, subject: str, catalogue: Catalogue, cells: dict[str, Any]
) -> list[dict[str, Any]]:
    bound, pending = bind(read_claims(), catalogue).tests, load_register().pending
    kills = faults_by_test(load_ledger())
    return [
        {
            "id": each,
            "capability": each.split("/")[0],
            "name": each.rpartition("/")[2].replace("-", " "),
            "place": place_of(entry),
            "sentence": entry.text,
            "pending": pending.get(each, ""),
            "tests": list(bound.get(each, ())),
            "faults": sorted({fault for test in bound.get(each, ()) for fault in kills.get(test, [])}),
            "cells": cells.get(each, {}) | _make_cell(evidence, each, subject),
        }
        for each, entry in catalogue.scenarios.items()
    ]


def _make_cell(evidence: Evidence, scenario_id: str, subject: str) -> dict[str, Any]:
    told = evidence.outcomes.get(scenario_id)
    if told is None:
        return {}
    cell = {
        "verdict": verdict_of(told.values()),
        "date": time.strftime("%Y-%m-%d"),
        "device": platform.processor() or platform.machine(),
        "seconds": round(sum(evidence.seconds.get(test, 0.0) for test in told), 2),
        "evidence": [f"{outcome} {test}" for test, outcome in told.items()],
    }
    return {subject: cell}
