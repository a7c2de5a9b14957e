"""Recorded runs of trainers; every run of the suite judges them again."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.judge.servers.exchange import Exchange
from conformance.judge.servers.gaps import load_gaps
from conformance.judge.servers.recording import ROOT, TRAINERS
from conformance.judge.servers.verdicts import VerdictRow
from conformance.judge.trainers.checks import BY_ID, CHECKS
from conformance.judge.trainers.judgement import TrainerJudgement
from conformance.judge.trainers.reading import last_line
from conformance.judge.trainers.runs import TrainerRuns

GAPS = Path(__file__).parent / "gaps"
LONGEST_OUTPUT = 300
FOLDERS = re.compile(r"/(?:[\w.+-]+/)+")
"""Of whoever recorded it; only the last line of what a trainer wrote is kept."""


@dataclass(slots=True, kw_only=True)
class TrainerRecording:
    """``trainer`` is its name and version; ``facts`` are of the day."""

    trainer: str
    dialect: str
    facts: dict[str, Any]
    runs: dict[str, Exchange] = field(default_factory=dict)

    def rows(self) -> list[VerdictRow]:
        """Judged now, against the known gaps."""
        judgement = TrainerJudgement(
            None,
            lambda _: "",
            gaps=load_gaps(GAPS / f"{self.trainer.rpartition('-')[0]}.yaml", BY_ID, server=self.trainer),
        )
        judgement.runs = TrainerRuns(None, made=dict(self.runs))
        return [judgement.verdict_of(check) for check in CHECKS]


def write_trainer(recording: TrainerRecording, folder: Path = TRAINERS) -> Path:
    """One event a line, with the verdicts, which are for readers."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {name: getattr(recording, name) for name in ("trainer", "dialect", "facts")}
    head["verdicts"] = {row.check.check_id: f"{row.state} {row.reason}".strip() for row in recording.rows()}
    lines = ["{", *(f' "{name}": {json.dumps(value)},' for name, value in head.items()), ' "runs": {']
    lines.append(",\n".join(_run_lines(name, exchange) for name, exchange in recording.runs.items()))
    path = folder / f"{recording.trainer}.json"
    path.write_text("\n".join([*lines, " }", "}"]).replace(f"{ROOT}/", "") + "\n", encoding="utf-8")
    return path


def _run_lines(name: str, exchange: Exchange) -> str:
    line = FOLDERS.sub("", last_line(exchange))[-LONGEST_OUTPUT:]
    notes = exchange.notes | {"output": line}
    events = ",\n   ".join(json.dumps(event) for event in notes.pop("events"))
    head = json.dumps({"untestable": exchange.untestable} | notes)[:-1]
    return f'  "{name}": {head}, "events": [\n   {events}\n  ]}}'


def read_trainer(path: Path) -> TrainerRecording:
    data = json.loads(path.read_text(encoding="utf-8"))
    runs = {name: Exchange(untestable=run.pop("untestable"), notes=run) for name, run in data["runs"].items()}
    return TrainerRecording(trainer=data["trainer"], dialect=data["dialect"], facts=data["facts"], runs=runs)


def recorded_trainers(folder: Path = TRAINERS) -> list[TrainerRecording]:
    """All that are kept, by name."""
    return [read_trainer(path) for path in sorted(folder.glob("*.json"))]


def trainer_rows(recordings: Iterable[TrainerRecording]) -> list[tuple[TrainerRecording, dict[str, VerdictRow]]]:
    """Verdicts by check."""
    return [(each, {row.check.check_id: row for row in each.rows()}) for each in recordings]
