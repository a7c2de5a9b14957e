"""Recorded exchanges per server, version and dialect; every run of the suite judges them again."""

import json
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from conformance.judge.servers.check import Check, CheckVerdict, judge
from conformance.judge.servers.checks import BY_ID
from conformance.judge.servers.exchange import Exchange, shortened

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "fixtures" / "exchanges"
MAX_AGE_DAYS = 90
"""Age from which on the suite names a recording; nothing fails by the calendar."""
DATED = re.compile(r'"date": "([^"]+)"')


@dataclass(slots=True, kw_only=True)
class Recording:
    """Of one server; ``server`` is its name and version, and for a server of several dialects the dialect."""

    server: str
    dialect: str
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the day: date, machine, how it was started, versions."""
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def verdicts(self) -> Mapping[str, CheckVerdict]:
        """Judged now; of checks that there still are."""
        return {name: judge(BY_ID[name], data) for name, data in self.exchanges.items() if name in BY_ID}

    def keep(self, check: Check, exchange: Exchange, seconds: float) -> None:
        self.exchanges[check.check_id] = exchange
        self.seconds[check.check_id] = seconds


def path_of(server: str, folder: Path = FOLDER) -> Path:
    return folder / f"{server}.json"


def write_recording(recording: Recording, folder: Path = FOLDER) -> Path:
    """One check a paragraph, so that a difference can be read."""
    folder.mkdir(parents=True, exist_ok=True)
    verdicts = recording.verdicts()
    data = {
        "server": recording.server,
        "dialect": recording.dialect,
        "facts": recording.facts,
        "checks": {
            name: {"verdict": verdicts[name].state, "reason": verdicts[name].reason, "seconds": recording.seconds[name]}
            | _kept(recording.exchanges[name])
            for name in sorted(recording.exchanges)
        },
    }
    path = path_of(recording.server, folder)
    path.write_text(_compact(data).replace(f"{ROOT}/", ""), encoding="utf-8")
    return path


def _kept(exchange: Exchange) -> dict[str, Any]:
    """As plain values; what was sent, and replies that are no JSON, are cut."""
    entry: dict[str, Any] = msgspec.to_builtins(exchange)
    for call in entry.get("calls", ()):
        if "sent" in call:
            call["sent"] = shortened(call["sent"])
        if isinstance(call.get("reply"), str):
            call["reply"] = call["reply"][:500]
    return entry


def read_recording(path: Path) -> Recording:
    """The verdicts in it are for readers; they are judged again. Checks that there are no more are left out."""
    data = json.loads(path.read_text(encoding="utf-8"))
    data["checks"] = {name: entry for name, entry in data["checks"].items() if name in BY_ID}
    own = {"verdict", "reason", "seconds"}
    return Recording(
        server=data["server"],
        dialect=data["dialect"],
        facts=data["facts"],
        exchanges={
            name: msgspec.convert({key: value for key, value in entry.items() if key not in own}, Exchange)
            for name, entry in data["checks"].items()
        },
        seconds={name: entry["seconds"] for name, entry in data["checks"].items()},
    )


def recorded_verdicts(path: Path) -> dict[str, str]:
    """As they were when it was recorded."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return {name: entry["verdict"] for name, entry in data["checks"].items()}


def recordings(folder: Path = FOLDER) -> list[Recording]:
    """All that are kept, by name."""
    return [read_recording(path) for path in sorted(folder.glob("*.json"))]


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


def age_lines(today: date, folder: Path = FOLDER) -> list[str]:
    """Name recordings older than ``MAX_AGE_DAYS``, and the command that refreshes them."""
    ages = {path.relative_to(folder): days_old(path, today) or 0 for path in sorted(folder.rglob("*.json"))}
    old = {path: days for path, days in ages.items() if days > MAX_AGE_DAYS}
    lines = [f"recorded {days} days ago: {path.with_suffix('')}" for path, days in old.items()]
    refresh = {
        f"python -m conformance.{kind} --older-than {MAX_AGE_DAYS}": [path for path in old if is_kind(path)]
        for kind, is_kind in (
            ("judge.servers.judge --all", lambda path: path.parent == Path()),
            ("judge.trainers.known", lambda path: path.parent != Path()),
        )
    }
    return lines + [f"again: {command}" for command, paths in refresh.items() if paths]


def facts_of_today(**further: Any) -> dict[str, Any]:
    """When and where."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "python": platform.python_version(),
    } | further


def _compact(data: dict[str, Any]) -> str:
    """Indented to the calls; a call is one line."""
    lines = ["{", *(f' "{name}": {json.dumps(data[name])},' for name in ("server", "dialect", "facts"))]
    lines.append(' "checks": {')
    entries = []
    for name, entry in data["checks"].items():
        head = {key: value for key, value in entry.items() if key != "calls"}
        calls = ",\n   ".join(json.dumps(call) for call in entry.get("calls", []))
        entries.append(f'  "{name}": {json.dumps(head)[:-1]}, "calls": [\n   {calls}\n  ]}}')
    return "\n".join([*lines, ",\n".join(entries), " }", "}"]) + "\n"
