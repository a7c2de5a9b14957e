"""A run of the judge for machines: one JSON file with everything, and JUnit."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

import msgspec

from conformance.servers.check import FAULTY, UNTESTABLE
from conformance.servers.gaps import BLOCKED, KNOWN
from conformance.servers.judgement import ServerJudgement
from conformance.servers.reproduce import command_for, curl_for, curl_of
from conformance.servers.verdicts import CONFORMS, INCOMPLETE, JUDGE_FAILED, MISSES, NOT_JUDGED, VerdictRow

FORMAT = 1
MEANINGS = {
    CONFORMS: "every MUST of the profile passed",
    MISSES: "a MUST is missed",
    INCOMPLETE: "nothing is missed, but a MUST could not be tested",
    NOT_JUDGED: "the server cannot be judged",
    JUDGE_FAILED: "the judge itself failed, or could not restore the server's first weights",
}
SKIPPED = (UNTESTABLE, BLOCKED, KNOWN)


def report_of(judgement: ServerJudgement) -> dict[str, Any]:
    """Plain values; what was sent and what came back is whole."""
    subject, found = judgement.subject, judgement.preflight
    return {
        "format": FORMAT,
        "url": subject.url,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "exit_code": judgement.exit_code,
        "meaning": MEANINGS[judgement.exit_code],
        "seconds": judgement.seconds,
        "preflight": {"problem": found.problem, "facts": found.facts, "warnings": found.warnings},
        "not_restored": judgement.not_restored,
        "checks": [_entry(row, judgement) for row in judgement.rows],
    }


def _entry(row: VerdictRow, judgement: ServerJudgement) -> dict[str, Any]:
    subject, calls = judgement.subject, row.exchange.calls if row.exchange else []
    return {
        "id": f"servers/{row.check.check_id}",
        "level": row.check.grade,
        "clause": row.check.clause,
        "sentence": row.check.sentence,
        "verdict": row.state,
        "blocked_by": row.reason if row.state == BLOCKED else None,
        "reason": row.reason,
        "seconds": row.seconds,
        "asked": row.num_asked,
        "again": command_for(row.check, subject),
        "curl": curl_of(row.exchange, subject),
        "notes": row.exchange.notes if row.exchange else {},
        "calls": [msgspec.to_builtins(call) | {"curl": curl_for(call, subject)} for call in calls],
    }


def write_json(judgement: ServerJudgement, path: Path) -> None:
    """Indented, in UTF-8."""
    text = json.dumps(report_of(judgement), indent=1, ensure_ascii=False, default=str)
    path.write_text(text + "\n", encoding="utf-8")


def write_junit(judgement: ServerJudgement, path: Path) -> None:
    """A missed MUST is a failure, a fault of the judge an error; what could not be tested is skipped, saying why."""
    report = report_of(judgement)
    suite = Element("testsuite", name=f"rollmatch-judge {report['url']}", time=str(report["seconds"]))
    for entry in report["checks"]:
        _add_case(suite, entry)
    if problem := report["preflight"]["problem"] or report["not_restored"]:
        case = SubElement(
            suite, "testcase", classname="servers", name="preflight" if not report["checks"] else "server"
        )
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
    name = entry["id"].partition("/")[2]
    case = SubElement(suite, "testcase", classname=f"servers.{entry['level']}", name=name, time=str(entry["seconds"]))
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
