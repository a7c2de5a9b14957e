"""``docs/servers.md``, from the recordings: which server does what, in plain words."""

from collections.abc import Sequence
from pathlib import Path

from conformance.servers.checks import CHECKS
from conformance.servers.known import KNOWN
from conformance.servers.recording import Recording, recordings
from conformance.servers.verdicts import Row, rows_of, summary

PAGE = Path(__file__).parents[2] / "docs" / "servers.md"
MARKS = {
    "passed": "yes",
    "missed": "**no**",
    "known-gap": "no",
    "advice": "no",
    "not-testable": "?",
    "stale-gap": "yes",
}
HEAD = """# What rollout servers do

Made by `python -m conformance.servers.judge --all` from `fixtures/exchanges/`, where everything that was sent and came
back is kept. Each server ran unmodified on a CPU with the digits model; NCCL was stood in for by gloo
(`conformance/servers/plugged/rollmatch_cpu.py`). Gloo tells a worker at once that its learner is gone; NCCL does not:
"yes" at a dead learner says nothing about GPUs. "-": not asked in that dialect.
"""


def write_page(path: Path = PAGE) -> None:
    """Write it anew."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(page_text(recordings()), encoding="utf-8")


def page_text(told: Sequence[Recording]) -> str:
    """One table, then what each server misses and why."""
    titles = {known.server: known.title for known in KNOWN}
    columns = [(recording, {row.check.check_id: row for row in rows_of(recording)}) for recording in told]
    lines = [HEAD, "| A server that passes ... | | " + " | ".join(r.server for r, _ in columns) + " |"]
    lines.append("|---|---|" + "---|" * len(columns))
    for check in CHECKS:
        cells = [_mark(rows.get(check.check_id)) for _, rows in columns]
        lines.append(f"| {check.sentence} | {check.grade} | " + " | ".join(cells) + " |")
    for recording, rows in columns:
        lines += _section(titles.get(recording.server, recording.server), recording, list(rows.values()))
    return "\n".join(lines) + "\n"


def _mark(row: Row | None) -> str:
    return MARKS[row.state] if row else "-"


def _section(title: str, recording: Recording, rows: Sequence[Row]) -> list[str]:
    facts = recording.facts
    lines = ["", f"## {title}: {recording.server}", "", f"Recorded {facts['date']}, {facts.get('vllm', '')}."]
    lines.append(f"{len(rows)} checks: {summary(rows)}.")
    missed = [row for row in rows if row.state != "passed"]
    return [*lines, *([""] if missed else []), *(f"- {_told(row)}" for row in missed)]


def _told(row: Row) -> str:
    return f"`{row.check.check_id}` ({row.check.grade}): {' '.join(row.reason.split())[:400]}"
