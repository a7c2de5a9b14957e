"""The pytest plugin: markers, the check before collection, evidence, and failures that quote the specification."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conformance.harness.binding.binding import bind
from conformance.harness.binding.claim import KINDS, read_claims
from conformance.harness.binding.evidence import Evidence, count_verdicts
from conformance.harness.binding.explanation import explain
from conformance.harness.binding.naming import clauses_named, scenarios_named
from conformance.harness.catalogue import Catalogue, load_catalogue
from conformance.harness.faults.bank import BANK
from conformance.harness.faults.claimed import unknown_faults
from conformance.harness.matrix import write_matrix

MARKERS = (
    "scenario(id): shows a scenario, named by its id or as capability/scenario",
    "clause(id): shows a sentence, capability/requirement#number, or several, ...#1,3",
    "kills(fault): fails when this fault of the bank is in the implementation",
    "tombstone(id): shows that a removed requirement is gone",
)
EVIDENCE = pytest.StashKey[Evidence]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("specification")
    group.addoption("--matrix", type=Path, metavar="DIR", help="write matrix.html, matrix.json, badge.json, junit.xml")
    group.addoption("--subject", default="reference", help="name of what is judged, for --matrix")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.stash[EVIDENCE] = Evidence()
    if hasattr(config, "workerinput"):
        return
    if (folder := config.getoption("matrix")) is not None:
        folder.mkdir(parents=True, exist_ok=True)
        config.option.xmlpath = config.option.xmlpath or str(folder / "junit.xml")
    check_claims()


def check_claims() -> None:
    """Refuse to start where a marker names what does not exist. Reads sources only, so that no worker is needed."""
    claims = read_claims()
    found = [*bind(claims, catalogue()).unknown, *unknown_faults(claims, BANK)]
    if found:
        raise pytest.UsageError("\n".join(str(finding) for finding in found))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Carried by the reports of a test, and so from workers to the one process that judges."""
    for item in items:
        item.user_properties += [("scenario", each) for each in _scenarios_of(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    ids = [*_scenarios_of(item), *_clauses_of(item)]
    if report.failed and ids:
        report.sections.append(("specification", explain(ids, item.nodeid, catalogue())))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Skipped scenarios fail a run that was otherwise fine."""
    if hasattr(session.config, "workerinput"):
        return
    evidence = session.config.stash[EVIDENCE]
    if evidence.findings() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if (folder := session.config.getoption("matrix")) is not None:
        from conformance.servers.plugin import rows_of_servers  # loads torch, which most runs of this need not

        subject, checks = session.config.getoption("subject"), rows_of_servers(session.config)
        write_matrix(folder, evidence, subject=subject, catalogue=catalogue(), checks=checks)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    evidence = config.stash[EVIDENCE]
    if not evidence.outcomes:
        return
    counts = ", ".join(f"{number} {verdict}" for verdict, number in count_verdicts(evidence.verdicts()).items())
    terminalreporter.write_line(f"scenarios: {counts} of {len(catalogue().scenarios)}")
    for finding in evidence.findings():
        terminalreporter.write_line(str(finding), red=True)


class Reports:
    """Takes reports of this process, or those that workers send."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.evidence.take(report)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(Reports(session.config.stash[EVIDENCE]), "rollmatch-evidence")


@cache
def catalogue() -> Catalogue:
    return load_catalogue()


def _scenarios_of(item: pytest.Item) -> list[str]:
    texts = [text for marker in item.iter_markers("scenario") for text in marker.args]
    return list(dict.fromkeys(each for text in texts for each in scenarios_named(text, catalogue())))


def _clauses_of(item: pytest.Item) -> list[str]:
    texts = [text for marker in item.iter_markers("clause") for text in marker.args]
    return [each for text in texts for each in clauses_named(text) if each in catalogue().clauses]


assert {marker.partition("(")[0] for marker in MARKERS} == set(KINDS)
