"""A run of the judge for machines: one JSON file with everything, and JUnit."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

import msgspec

from conformance.judge.servers.check import FAULTY, INAPPLICABLE, UNTESTABLE, Check
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.gaps import BLOCKED, KNOWN
from conformance.judge.servers.preflight import Preflight
from conformance.judge.servers.verdicts import CONFORMS, INCOMPLETE, JUDGE_FAILED, MISSES, NOT_JUDGED, VerdictRow

FORMAT = 1
MEANINGS = {
    CONFORMS: "every MUST of the profile passed",
    MISSES: "a MUST is missed",
    INCOMPLETE: "nothing is missed, but a MUST could not be tested",
    NOT_JUDGED: "the server or trainer cannot be judged",
    JUDGE_FAILED: "the judge itself failed, or could not restore the server's first weights",
}
SKIPPED = (UNTESTABLE, BLOCKED, KNOWN, INAPPLICABLE)


class Judged(Protocol):
    """What a report is about: a server or a trainer."""

    preflight: Preflight
    rows: list[VerdictRow]
    not_restored: str
    not_asked: dict[str, list[str]]

    @property
    def family(self) -> str:
        """Of its checks: ``servers`` or ``trainers``."""

    @property
    def title(self) -> str:
        """A URL or a command."""

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
    """Plain values; what was sent and what came back is whole."""
    found = judgement.preflight
    return {
        "format": FORMAT,
        "url": judgement.title,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "exit_code": judgement.exit_code,
        "meaning": MEANINGS[judgement.exit_code],
        "seconds": judgement.seconds,
        "preflight": {"problem": found.problem, "facts": found.facts, "warnings": found.warnings},
        "not_restored": judgement.not_restored,
        "not_asked": {f"{judgement.family}/{name}": needs for name, needs in judgement.not_asked.items()},
        "checks": [_entry(row, judgement) for row in judgement.rows],
    }


def _entry(row: VerdictRow, judgement: Judged) -> dict[str, Any]:
    calls = row.exchange.calls if row.exchange else []
    return {
        "id": f"{judgement.family}/{row.check.check_id}",
        "level": row.check.grade,
        "clause": row.check.clause,
        "sentence": row.check.sentence,
        "verdict": row.state,
        "blocked_by": row.reason if row.state == BLOCKED else None,
        "reason": row.reason,
        "seconds": row.seconds,
        "asked": row.num_asked,
        "again": judgement.again(row.check),
        "curl": judgement.decisive_curl(row.exchange),
        "notes": row.exchange.notes if row.exchange else {},
        "calls": [msgspec.to_builtins(call) | {"curl": judgement.curl(call)} for call in calls],
    }


def write_json(judgement: Judged, path: Path) -> None:
    """Indented, in UTF-8."""
    text = json.dumps(report_of(judgement), indent=1, ensure_ascii=False, default=str)
    path.write_text(text + "\n", encoding="utf-8")


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
