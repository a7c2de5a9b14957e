"""A run of the judge for machines: one JSON file with everything, and JUnit."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

import msgspec

from conformance.judge.rule_sets import came_in
from conformance.judge.servers.check import FAULTY, INAPPLICABLE, MUST, UNTESTABLE, Check
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.gaps import BLOCKED, KNOWN
from conformance.judge.servers.preflight import Preflight
from conformance.judge.servers.verdicts import CONFORMS, INCOMPLETE, JUDGE_FAILED, MISSES, NOT_JUDGED, VerdictRow

FORMAT = 2
MEANINGS = {
    CONFORMS: "every MUST of the profile passed",
    MISSES: "a MUST is missed, or a known gap is stale",
    INCOMPLETE: "nothing is missed, but a MUST could not be tested",
    NOT_JUDGED: "the server or trainer cannot be judged",
    JUDGE_FAILED: "the judge itself failed, or could not restore the server's first weights",
}
SKIPPED = (UNTESTABLE, BLOCKED, KNOWN, INAPPLICABLE)


def meaning_of(code: int, rows: Sequence[VerdictRow]) -> str:
    """What an exit code says of these verdicts: a MUST that a known gap excuses did not pass."""
    excused = sum(row.state == KNOWN and row.check.grade == MUST for row in rows)
    return MEANINGS[code] + f", but for known gaps: {excused}" * (code == CONFORMS and excused > 0)


class ReportedCall(RecordedCall, kw_only=True, omit_defaults=True):
    """A call, and how to make it again."""

    curl: str = ""


class ReportEntry(Exchange, kw_only=True):
    """A check: its rule, its verdict and what it was made from."""

    id: str
    """``servers/`` or ``trainers/`` and the check."""
    level: str
    since: str
    """Rule set in which it came."""
    clause: str
    sentence: str
    verdict: str
    blocked_by: str | None
    reason: str
    seconds: float
    asked: int
    again: str
    curl: str
    calls: list[ReportedCall]

    @property
    def check_id(self) -> str:
        return self.id.partition("/")[2]


class ReportPreflight(msgspec.Struct, kw_only=True):
    """What was found before the first check."""

    problem: str
    facts: dict[str, Any]
    warnings: list[str]


class Report(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One run over one server or trainer, as in ``report.schema.json``."""

    format: Literal[2]
    rules: str
    """The rule set that it was judged by."""
    server: str
    """Name and version; empty where nobody named it."""
    dialect: str
    url: str
    date: str
    exit_code: int
    meaning: str
    seconds: float
    reproduce: str
    """Commands that start the server, if they are known, and judge it."""
    preflight: ReportPreflight
    not_restored: str
    not_asked: dict[str, list[str]]
    checks: list[ReportEntry]


class ReportInvalid(ValueError):
    """A file is no report of this format."""


def schema() -> dict[str, Any]:
    """JSON schema of every report; ``report.schema.json`` in the wheel holds it."""
    return msgspec.json.schema(Report)


def read_report(path: Path) -> Report:
    """Errors: ``ReportInvalid``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError) as error:
        raise ReportInvalid(f"{path}: {error}") from None


class Judged(Protocol):
    """What a report is about: a server or a trainer."""

    preflight: Preflight
    rows: list[VerdictRow]
    not_restored: str
    not_asked: dict[str, list[str]]
    rules: str

    @property
    def family(self) -> str:
        """Of its checks: ``servers`` or ``trainers``."""

    @property
    def title(self) -> str:
        """A URL or a command."""

    @property
    def server(self) -> str:
        """Name and version; may be empty."""

    @property
    def dialect(self) -> str: ...

    @property
    def reproduce(self) -> str:
        """Commands that give this report again."""

    @property
    def exit_code(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    def again(self, check: Check) -> str:
        """A command that asks this check alone."""

    def curl(self, call: RecordedCall) -> str:
        """Of one call; empty where there is none."""

    def decisive_curl(self, exchange: Exchange | None) -> str:
        """Of the call that most likely shows a miss."""


def report_of(judgement: Judged) -> dict[str, Any]:
    """Plain values, as ``Report`` has them; what was sent and what came back is whole."""
    found = judgement.preflight
    return valid(
        {
            "format": FORMAT,
            "rules": judgement.rules,
            "server": judgement.server,
            "dialect": judgement.dialect,
            "url": judgement.title,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "exit_code": judgement.exit_code,
            "meaning": meaning_of(judgement.exit_code, judgement.rows),
            "seconds": judgement.seconds,
            "reproduce": judgement.reproduce,
            "preflight": {"problem": found.problem, "facts": found.facts, "warnings": found.warnings},
            "not_restored": judgement.not_restored,
            "not_asked": {f"{judgement.family}/{name}": needs for name, needs in judgement.not_asked.items()},
            "checks": [_entry(row, judgement) for row in judgement.rows],
        }
    )


def valid(report: Mapping[str, Any]) -> dict[str, Any]:
    """The same in plain values. Errors: ``msgspec.ValidationError``."""
    plain = msgspec.to_builtins(report, enc_hook=str)
    checked: dict[str, Any] = msgspec.to_builtins(msgspec.convert(plain, Report))
    return checked


def _entry(row: VerdictRow, judgement: Judged) -> dict[str, Any]:
    calls = row.exchange.calls if row.exchange else []
    return entry_of(row, judgement.family) | {
        "again": judgement.again(row.check),
        "curl": judgement.decisive_curl(row.exchange),
        "calls": [msgspec.to_builtins(call, enc_hook=str) | {"curl": judgement.curl(call)} for call in calls],
    }


def entry_of(row: VerdictRow, family: str) -> dict[str, Any]:
    """Without how to ask again."""
    exchange = row.exchange or Exchange(untestable=row.reason * (row.state == UNTESTABLE))
    return {
        "id": f"{family}/{row.check.check_id}",
        "level": row.check.grade,
        "since": came_in(family, row.check.check_id),
        "clause": row.check.clause,
        "sentence": row.check.sentence,
        "verdict": row.state,
        "blocked_by": row.reason if row.state == BLOCKED else None,
        "reason": row.reason,
        "seconds": row.seconds,
        "asked": row.num_asked,
        "again": "",
        "curl": "",
        "notes": exchange.notes,
        "stopped": exchange.stopped,
        "untestable": exchange.untestable,
        "fault": exchange.fault,
        "calls": exchange.calls,
    }


def write_json(judgement: Judged, path: Path) -> None:
    """In UTF-8, a call a line."""
    path.write_text(text_of(report_of(judgement)), encoding="utf-8")


def text_of(report: Mapping[str, Any]) -> str:
    """A check is a paragraph and a call is a line, so that a difference can be read."""
    head = [f" {_json(name)}: {_json(value)}," for name, value in report.items() if name != "checks"]
    entries = []
    for entry in report["checks"]:
        calls = ",\n   ".join(map(_json, entry["calls"]))
        kept = {name: value for name, value in entry.items() if name != "calls"}
        entries.append(f'  {_json(kept)[:-1]}, "calls": [\n   {calls}\n  ]}}')
    return "\n".join(["{", *head, ' "checks": [', ",\n".join(entries), " ]", "}"]) + "\n"


def _json(value: Any) -> str:
    """NaN and infinity, which JSON lacks, become null."""
    return msgspec.json.encode(value).decode()


def write_junit(judgement: Judged, path: Path) -> None:
    """A missed MUST is a failure, a fault of the judge an error; what was not tested is skipped, saying why."""
    report = report_of(judgement)
    suite = Element("testsuite", name=f"rollmatch-judge {report['url']}", time=str(report["seconds"]))
    for entry in report["checks"]:
        _add_case(suite, entry)
    for check_id, needs in report["not_asked"].items():
        family, _, name = check_id.partition("/")
        case = SubElement(suite, "testcase", classname=f"{family}.not-asked", name=name)
        SubElement(case, "skipped", message=f"not asked: needs {', '.join(needs)}")
    if problem := report["preflight"]["problem"] or report["not_restored"]:
        name = "preflight" if not report["checks"] else "server"
        case = SubElement(suite, "testcase", classname=judgement.family, name=name)
        SubElement(case, "error", message=_plain(problem))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"), ("tests", "testcase")):
        suite.set(name, str(len(list(suite.iter(tag)))))
    tree = ElementTree(suite)
    indent(tree)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _plain(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(letter for letter in text if letter in "\t\n" or letter >= " ")


def _add_case(suite: Element, entry: Mapping[str, Any]) -> None:
    family, _, name = entry["id"].partition("/")
    case = SubElement(suite, "testcase", classname=f"{family}.{entry['level']}", name=name, time=str(entry["seconds"]))
    verdict, message = entry["verdict"], _plain(f"{entry['verdict']}: {entry['reason']}")
    if verdict in ("must", "stale-gap"):
        failure = SubElement(case, "failure", message=message)
        parts = filter(None, [entry["clause"], entry["sentence"], entry["reason"], entry["again"], entry["curl"]])
        failure.text = _plain("\n".join(parts))
    elif verdict == FAULTY:
        SubElement(case, "error", message=message)
    elif verdict in SKIPPED:
        SubElement(case, "skipped", message=message)
    elif verdict != "pass" or entry["reason"]:
        SubElement(case, "system-out").text = message
