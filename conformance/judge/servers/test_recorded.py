"""Every recorded exchange, judged again: the verdict is the one it had, and known gaps explain what is missed."""

import pytest

from conformance.judge.servers.check import INAPPLICABLE
from conformance.judge.servers.checks import CHECKS, checks_for
from conformance.judge.servers.gaps import FOLDER as GAPS
from conformance.judge.servers.gaps import gaps_of
from conformance.judge.servers.known import ADAPTERS, KNOWN
from conformance.judge.servers.page import PAGE, RULES_PAGE, page_text, rules_text
from conformance.judge.servers.recording import path_of, recorded_verdicts, recordings
from conformance.judge.trainers.page import trainers_text

RECORDED = {each.server: each for each in recordings()}


def test_every_known_version_is_recorded_with_its_packages():
    assert {known.server for known in KNOWN} <= RECORDED.keys()  # others bring reports of theirs
    for known in KNOWN:
        facts = RECORDED[known.server].facts
        assert known.version in facts["vllm"] or known.name != "vllm"
        assert not known.beside or {*known.beside} <= {*facts["packages"]}


@pytest.mark.parametrize("server", RECORDED)
def test_what_was_recorded_is_judged_as_it_was(server):
    recording = RECORDED[server]
    judged = {row.check.check_id: row.state for row in recording.rows()}
    assert judged == recorded_verdicts(path_of(server))


@pytest.mark.parametrize("server", [known.server for known in KNOWN])
def test_every_check_of_the_dialect_is_recorded(server):
    """Checks of a later day are shown as not tested until it is recorded again."""
    recording = RECORDED[server]
    checks = {check.check_id: check.since for check in checks_for(recording.dialect)}
    due = {name for name, since in checks.items() if since <= recording.facts["date"]}
    assert due <= recording.exchanges.keys() <= checks.keys()


SLEEP = ("a-server-that-slept-answers-as-before", "a-deep-sleeper-serves-the-weights-it-is-sent")
NOT_OURS = dict.fromkeys((*ADAPTERS, *SLEEP), INAPPLICABLE)
"""Its adapters are merged, and it does not sleep: it serves on GPUs of its own."""
ALLOWED = ("pass", "known-gap", INAPPLICABLE)


@pytest.mark.parametrize("server", RECORDED)
def test_what_is_missed_is_a_known_gap_and_no_gap_is_stale(server):
    unexplained = [str(row) for row in RECORDED[server].rows() if row.state not in ALLOWED]
    assert unexplained == []


@pytest.mark.scenario(clauses=["servers/a-server-can-be-found-and-watched#6,7"])
@pytest.mark.parametrize("server", [name for name in RECORDED if name.startswith("rollmatch-")])
def test_our_own_server_passes_every_check_of_what_it_offers(server):
    rows = RECORDED[server].rows()
    assert [str(row) for row in rows if row.state != NOT_OURS.get(row.check.check_id, "pass")] == []


def test_gaps_belong_to_servers_that_were_recorded():
    """In every recorded version: a range that reaches further than what was seen is cut."""
    names = {name.rpartition("-")[0] for name in RECORDED}
    files = {path.stem for path in GAPS.glob("*.yaml")}
    assert files <= names
    assert not any(name.startswith("rollmatch-") for name in files)
    gaps = {name: gaps_of(name) for name in RECORDED if name.rpartition("-")[0] in files}
    assert all(gaps.values())
    assert all(gap.reason and "{" not in gap.link for found in gaps.values() for gap in found.values())
    assert all("#L" in gap.link for found in gaps.values() for gap in found.values())


def test_the_page_shows_the_recordings():
    assert PAGE.read_text(encoding="utf-8") == page_text(list(RECORDED.values())) + trainers_text()
    assert RULES_PAGE.read_text(encoding="utf-8") == rules_text()


def test_dangerous_checks_come_last():
    assert [check.is_dangerous for check in CHECKS] == sorted(check.is_dangerous for check in CHECKS)
