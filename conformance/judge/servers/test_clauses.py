"""The checks are a capability of the specification: each cites its own clause, word by word."""

import pytest

from conformance.doubles.judged import judgement_of, small_server
from conformance.judge.servers.check import SHOULD, Check
from conformance.judge.servers.checks import CHECKS
from conformance.judge.servers.reports import report_of
from conformance.judge.trainers.checks import CHECKS as CHECKS_OF_TRAINERS
from conformance.tools.specification import read_specification


def problems_of(checks, clauses):
    """What is wrong, one line each; ``clauses``: id -> sentence."""
    problems = [f"{c.check_id}: {c.clause!r} is no clause" for c in checks if c.clause not in clauses]
    known = [check for check in checks if check.clause in clauses]
    problems += [f"{c.check_id}: another sentence than {c.clause}" for c in known if c.sentence != clauses[c.clause]]
    problems += [
        f"{c.check_id}: has level {c.grade}" for c in known if (" SHOULD " in clauses[c.clause]) != (c.grade == SHOULD)
    ]
    cited = [check.clause for check in checks]
    problems += [f"{name}: cited by {cited.count(name)} checks" for name in clauses if cited.count(name) != 1]
    return problems


def clauses_of(capability):
    clauses = read_specification().clauses.items()
    return {name: rule.text for name, rule in clauses if name.startswith(f"{capability}/")}


@pytest.mark.scenario(clauses=["judging/a-miss-can-be-seen-again#2"])
def test_every_check_cites_its_own_clause_and_every_clause_has_one_check():
    assert problems_of(CHECKS, clauses_of("servers")) == []
    assert problems_of(CHECKS_OF_TRAINERS, clauses_of("trainers")) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"clause": "servers/x#1"}, "a: 'servers/x#1' is no clause"),
        ({"clause": ""}, "a: '' is no clause"),
        ({"sentence": "It does."}, "a: another sentence than servers/r#1"),
        ({"grade": SHOULD}, "a: has level SHOULD"),
    ],
)
def test_a_wrong_citation_is_found(change, problem):
    def made(**fields):
        right = {"check_id": "a", "sentence": "It MUST do.", "clause": "servers/r#1", "ask": print, "judge": str}
        return Check(**right | fields)

    clauses = {"servers/r#1": "It MUST do."}
    assert problems_of([made()], clauses) == []
    assert problem in problems_of([made(**change)], clauses)
    assert problems_of([made(), made()], clauses) == ["servers/r#1: cited by 2 checks"]


def test_a_miss_is_reported_with_the_clause_and_its_sentence():
    check = next(check for check in CHECKS if check.check_id == "logprobs-fit-the-ids")
    with small_server() as server:
        judgement = judgement_of(server)
        judgement.verdict_of(check)
    [entry] = report_of(judgement)["checks"]
    assert entry["verdict"] == "must"
    assert entry["sentence"] == read_specification().clauses[entry["clause"]].text
    assert entry["calls"][0]["sent"]["prompts"]
    assert "reply" in entry["calls"][0]
    assert entry["curl"].startswith(f"curl -sS -i -X POST {server.url}/generate/")
