"""Reports that are kept: what servers were asked and said; every run of the suite judges them again."""

import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from conformance.judge.rule_sets import NEWEST, SERVERS, judged_by
from conformance.judge.servers.check import INAPPLICABLE, Check, CheckVerdict, judge
from conformance.judge.servers.checks import BY_ID, CHECKS
from conformance.judge.servers.exchange import Exchange, shortened
from conformance.judge.servers.gaps import BLOCKED, Gap, gaps_of, settle
from conformance.judge.servers.reports import FORMAT, entry_of, meaning_of, read_report, text_of, valid
from conformance.judge.servers.verdicts import VerdictRow, exit_code

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "reports"
TRAINERS = ROOT / "fixtures" / "exchanges" / "trainers"
"""Recordings of trainers; those of servers are reports."""
MAX_AGE_DAYS = 90
"""Age from which on the suite names a recording; nothing fails by the calendar."""
DATED = re.compile(r'"date": ?"([-\d]{10})')


@dataclass(slots=True, kw_only=True)
class Recording:
    """Of one server; ``server`` is its name and version, and for a server of several dialects the dialect."""

    server: str
    dialect: str
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the day: date, machine, how it was started, versions."""
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    rules: str = NEWEST
    reproduce: str = ""
    not_asked: dict[str, list[str]] = field(default_factory=dict)
    """Checks that the run left out, and the options that they need."""

    def verdicts(self) -> Mapping[str, CheckVerdict]:
        """Judged now; of checks that there still are."""
        return {name: judge(BY_ID[name], data) for name, data in self.exchanges.items() if name in BY_ID}

    def rows(self, gaps: Mapping[str, Gap] | None = None) -> list[VerdictRow]:
        """By its rule set, against these ``gaps``; default: those that are known of its server."""
        known, verdicts = gaps_of(self.server) if gaps is None else gaps, self.verdicts()
        return [
            VerdictRow(
                check=check,
                state=state,
                reason=reason,
                seconds=self.seconds[check.check_id],
                exchange=self.exchanges[check.check_id],
            )
            for check in judged_by(self.rules, SERVERS, CHECKS)
            if check.check_id in verdicts
            for state, reason in [settle(check, verdicts[check.check_id], known)]
        ]

    def keep(self, check: Check, exchange: Exchange, seconds: float) -> None:
        self.exchanges[check.check_id] = exchange
        self.seconds[check.check_id] = seconds


def path_of(server: str, folder: Path = FOLDER, rules: str = NEWEST) -> Path:
    """``reports/<rules>/<server>/<version>.json``."""
    name, _, version = server.rpartition("-")
    return folder / rules / name / f"{version}.json"


def write_recording(recording: Recording, folder: Path = FOLDER) -> Path:
    """As a report, judged now; what was sent, and replies that are no JSON, are cut."""
    path = path_of(recording.server, folder, recording.rules)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, facts = recording.rows(), recording.facts
    code = exit_code(rows)
    report = {
        "format": FORMAT,
        "rules": recording.rules,
        "server": recording.server,
        "dialect": recording.dialect,
        "url": facts.get("url", ""),
        "date": facts.get("date", ""),
        "exit_code": code,
        "meaning": meaning_of(code, rows),
        "seconds": facts.get("seconds", 0.0),
        "reproduce": recording.reproduce,
        "preflight": {"problem": "", "facts": facts, "warnings": facts.get("outside", [])},
        "not_restored": "",
        "not_asked": recording.not_asked,
        "checks": [_kept(row) for row in sorted(rows, key=lambda row: row.check.check_id)],
    }
    path.write_text(text_of(valid(report)).replace(f"{ROOT}/", ""), encoding="utf-8")
    return path


def _kept(row: VerdictRow) -> dict[str, Any]:
    entry: dict[str, Any] = msgspec.to_builtins(entry_of(row, SERVERS))
    for call in entry["calls"]:
        if "sent" in call:
            call["sent"] = shortened(call["sent"])
        if isinstance(call.get("reply"), str):
            call["reply"] = call["reply"][:500]
    return entry


def read_recording(path: Path) -> Recording:
    """Of a kept report, or of one that a run has just written. Checks that there are no more are left out.

    The verdicts in it are for readers; they are judged again. Errors: ``ReportInvalid``.
    """
    report = read_report(path)
    asked = [
        entry
        for entry in report.checks
        if entry.check_id in BY_ID and entry.verdict != BLOCKED and (entry.verdict != INAPPLICABLE or entry.calls)
    ]
    return Recording(
        server=report.server,
        dialect=report.dialect,
        facts={"date": report.date[:10]} | report.preflight.facts,
        exchanges={entry.check_id: _exchange_of(entry) for entry in asked},
        seconds={entry.check_id: entry.seconds for entry in asked},
        rules=report.rules,
        reproduce=report.reproduce,
        not_asked=report.not_asked,
    )


def _exchange_of(entry: Any) -> Exchange:
    exchange = msgspec.convert(msgspec.to_builtins(entry), Exchange)
    exchange.inapplicable = entry.reason * (entry.verdict == INAPPLICABLE)
    return exchange


def recorded_verdicts(path: Path) -> dict[str, str]:
    """As they were when it was recorded."""
    return {entry.check_id: entry.verdict for entry in read_report(path).checks}


def recordings(folder: Path = FOLDER) -> list[Recording]:
    """All of the newest rule set, by name."""
    return [read_recording(path) for path in sorted((folder / NEWEST).rglob("*.json"))]


def days_old(path: Path, today: date) -> int | None:
    """Age of a recording in days; None where there is no recording."""
    if not path.exists():
        return None
    with path.open(encoding="utf-8") as lines:
        dated = next(found for found in map(DATED.search, lines) if found)
    return (today - date.fromisoformat(dated[1])).days


def is_due(path: Path, older_than: int | None, today: date) -> bool:
    """Whether to record it: not recorded in the last ``older_than`` days, or no such limit."""
    age = days_old(path, today)
    return older_than is None or age is None or age > older_than


def age_lines(today: date, folders: Sequence[Path] = (FOLDER / NEWEST, TRAINERS)) -> list[str]:
    """Name recordings of servers and of trainers older than ``MAX_AGE_DAYS``, and the command that refreshes them."""
    lines, refresh = [], []
    for folder, command in zip(folders, ("judge.servers.judge --all", "judge.trainers.known"), strict=True):
        ages = {path.relative_to(folder): days_old(path, today) or 0 for path in sorted(folder.rglob("*.json"))}
        old = [
            f"recorded {days} days ago: {path.with_suffix('')}" for path, days in ages.items() if days > MAX_AGE_DAYS
        ]
        refresh += [f"again: python -m conformance.{command} --older-than {MAX_AGE_DAYS}"] * bool(old)
        lines += old
    return lines + refresh


def facts_of_today(**further: Any) -> dict[str, Any]:
    """When and where."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "python": platform.python_version(),
    } | further
