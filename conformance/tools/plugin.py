"""The pytest plugin: the ``scenario`` marker, evidence, failures that quote the specification, ``--matrix``."""

import shlex
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from conformance.tools.binding import expand, unknown
from conformance.tools.evidence import Evidence
from conformance.tools.matrix import write_matrix
from conformance.tools.specification import read_specification

MARKER = "scenario(*ids, clauses=()): shows scenarios (capability/name) and sentences (capability/requirement#1,3)"
EVIDENCE = pytest.StashKey[Evidence]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("specification")
    group.addoption("--matrix", type=Path, metavar="DIR", help="write matrix.html, matrix.json, badge.json, junit.xml")
    group.addoption("--subject", default="reference", help="name of what is judged, for --matrix")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    config.stash[EVIDENCE] = Evidence()
    config.pluginmanager.register(config.stash[EVIDENCE], "rollmatch-evidence")
    folder = config.getoption("matrix")
    if folder is not None and not hasattr(config, "workerinput"):
        folder.mkdir(parents=True, exist_ok=True)
        config.option.xmlpath = config.option.xmlpath or str(folder / "junit.xml")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reports carry the ids, also from workers to the process that judges."""
    for item in items:
        item.user_properties += [("scenario", each) for each in rules_of(item) if "#" not in each]


def pytest_runtest_setup(item: pytest.Item) -> None:
    specification = read_specification()
    for each in rules_of(item):
        if each not in specification.scenarios and each not in specification.clauses:
            pytest.fail(unknown(each, specification), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.failed and (ids := rules_of(item)):
        report.sections.append(("specification", explain(ids, item.nodeid)))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Skipped scenarios fail a run that was otherwise fine."""
    if hasattr(session.config, "workerinput"):
        return
    evidence = session.config.stash[EVIDENCE]
    if evidence.not_shown() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if (folder := session.config.getoption("matrix")) is not None:
        from conformance.judge.servers.recording import recordings
        from conformance.judge.servers.verdicts import matrix_rows

        judged = matrix_rows((each.server, each.facts["date"], each.rows()) for each in recordings())
        write_matrix(folder, evidence, subject=session.config.getoption("subject"), checks=judged)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    from conformance.judge.servers.recording import age_lines

    for line in age_lines(date.today()):  # of this machine, as in the recordings
        terminalreporter.write_line(line, yellow=True)
    evidence = config.stash[EVIDENCE]
    if not evidence.outcomes:
        return
    counts, scenarios = Counter(evidence.verdicts().values()), read_specification().scenarios
    counts["not run"] = len(scenarios.keys() - evidence.outcomes.keys())
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("passed", "failed", "not-shown", "not run"))
    terminalreporter.write_line(f"scenarios: {summary} of {len(scenarios)}")
    for line in evidence.not_shown():
        terminalreporter.write_line(line, red=True)


def rules_of(item: pytest.Item) -> list[str]:
    """Ids of all markers of a test."""
    marks = item.iter_markers("scenario")
    return list(dict.fromkeys(each for mark in marks for each in expand(mark.args, mark.kwargs.get("clauses", ()))))


def explain(ids: list[str], node_id: str) -> str:
    """Each rule with its place and text, and a command that runs the test again."""
    specification = read_specification()
    rules = {**specification.scenarios, **specification.clauses}
    parts = []
    for rule in (rules[each] for each in ids if each in rules):
        text = "\n".join(f"    {line}" for line in rule.text.split("\n"))
        parts.append(f"{rule.place}  {rule.rule_id}\n{text}")
    return "\n".join([*parts, f"again:  python -m pytest {shlex.quote(node_id)}"])
