"""Blame, confirmation and quiet: made-up checks of a server that is an HTTP double."""

import json
import shlex
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from conformance.doubles.judged import REPLY, judgement_of, make_check, small_server
from conformance.judge.servers.check import MUST, SHOULD
from conformance.judge.servers.checks import BY_ID, CHECKS
from conformance.judge.servers.dialects import DIALECTS
from conformance.judge.servers.profiles import UnknownCheck, checks_of, required_by
from conformance.judge.servers.reports import report_of
from conformance.judge.servers.verdicts import VerdictRow, exit_code


@pytest.mark.scenario("judging/a-miss-that-is-not-seen-again", clauses=["judging/a-verdict-names-one-cause#1"])
def test_a_miss_that_is_not_seen_again_is_a_pass_with_a_remark():
    with small_server() as server:
        row = judgement_of(server).verdict_of(make_check("shaky", "late", ""))
        assert server.calls.count("/shaky/") == row.num_asked == 3
    assert (row.state, "late" in row.reason) == ("pass", True)


@pytest.mark.scenario("judging/a-miss-that-is-seen-again")
@pytest.mark.parametrize(("grade", "verdict", "code"), [(MUST, "must", 1), (SHOULD, "should", 0)])
def test_a_miss_that_is_seen_again_counts(grade, verdict, code):
    with small_server() as server:
        judgement = judgement_of(server)
        row = judgement.verdict_of(make_check("wrong", "no", grade=grade))
        assert server.calls.count("/wrong/") == row.num_asked == 2
    assert (row.state, row.reason, judgement.exit_code) == (verdict, "no", code)


def test_a_miss_in_two_of_three_times_counts():
    with small_server() as server:
        row = judgement_of(server).verdict_of(make_check("often", "no", "", "no"))
    assert (row.state, row.num_asked) == ("must", 3)


@pytest.mark.scenario("judging/what-builds-on-a-missed-check", clauses=["judging/a-verdict-names-one-cause#2"])
def test_what_builds_on_a_missed_check_is_blocked_by_the_first_cause():
    first, second = make_check("first", "no"), make_check("second", requires=("first",))
    third, free = make_check("third", requires=("second",)), make_check("free")
    with small_server() as server:
        judgement = judgement_of(server)
        rows = [judgement.verdict_of(check) for check in (first, second, third, free)]
        assert not {"/second/", "/third/"} & {*server.calls}
    assert [(row.state, row.reason) for row in rows[1:]] == [("blocked-by", "first")] * 2 + [("pass", "")]


def test_checks_with_the_same_calls_are_asked_once():
    first = make_check("first")
    second = make_check("second", ask=first.ask)
    with small_server() as server:
        judgement = judgement_of(server)
        assert [judgement.verdict_of(check).state for check in (first, second)] == ["pass", "pass"]
        assert server.calls.count("/first/") == 1


@pytest.mark.scenario("judging/a-server-that-dies-under-a-check", clauses=["judging/a-verdict-names-one-cause#3"])
def test_a_server_that_dies_under_a_check_is_blamed_on_it(monkeypatch):
    monkeypatch.setattr("conformance.judge.servers.judgement.QUIET_S", 0.5)
    dead = []

    def kill(talk):
        talk.post("last", "/last/")
        dead.append(True)

    with small_server(generate=lambda body: (500, {}) if dead else (200, REPLY)) as server:
        judgement = judgement_of(server)
        rows = [judgement.verdict_of(check) for check in (make_check("a"), make_check("b", ask=kill), make_check("c"))]
    assert [row.state for row in rows] == ["pass", "must", "blocked-by"]
    assert (rows[2].reason, judgement.exit_code) == ("b", 1)


@pytest.mark.scenario("judging/a-fault-of-the-judge", clauses=["judging/a-verdict-names-one-cause#4"])
def test_a_fault_of_the_judge_is_not_the_servers():
    with small_server() as server:
        judgement = judgement_of(server)
        row = judgement.verdict_of(make_check("faulty", ask=lambda talk: 1 / 0))
    assert (row.state, "ZeroDivisionError" in row.reason, judgement.exit_code) == ("harness-error", True, 5)


def test_a_fault_while_judging_is_not_the_servers():
    check = replace(make_check("faulty"), judge=lambda exchange: 1 / 0)
    with small_server() as server:
        row = judgement_of(server).verdict_of(check)
    assert (row.state, "ZeroDivisionError" in row.reason) == ("harness-error", True)


def cannot_leave(talk, number):
    """As vLLM 0.26, which has no route for it."""
    talk.leaving.append(lambda: talk.post("shut", "/missing/", note=False))


@pytest.mark.parametrize(
    ("sync", "problem"),
    [
        (lambda talk, number: {}["no such sender"], "no such sender"),
        (lambda talk, number: talk.post("update", "/missing/"), "update: POST /missing/ -> 404"),
        (cannot_leave, ""),
    ],
)
def test_first_weights_that_do_not_come_back_are_reported(monkeypatch, sync, problem):
    monkeypatch.setattr("conformance.judge.servers.judgement.sync", sync)
    with small_server() as server:
        judgement = judgement_of(server)
        judgement.subject.transport = "gloo"
        judgement.subject.policies = SimpleNamespace(encode=lambda text: [1, 2], tolerance=0.001)
        judgement.verdict_of(make_check("update", needs=("model", "group"), ask=lambda talk: talk.post("a", "/a/")))
        judgement.close()
    assert (problem in judgement.not_restored, judgement.exit_code) == (True, 5 if problem else 0)


def test_a_reply_of_another_form_is_the_servers_fault_wherever_it_is_read():
    def read(talk):
        talk.subject.dialect.read(talk.get("strange", "/get_world_size/"))

    with small_server() as server:
        row = judgement_of(server).verdict_of(make_check("read", ask=read))
    assert (row.state, "another form" in row.reason) == ("must", True)


@pytest.mark.scenario(
    "judging/a-dangerous-check-without-leave", clauses=["judging/the-server-is-left-as-it-was-found#1"]
)
@pytest.mark.parametrize(("dangerous", "verdict"), [(False, "not-testable"), (True, "pass")])
def test_a_dangerous_check_needs_leave(dangerous, verdict):
    with small_server() as server:
        row = judgement_of(server, dangerous=dangerous).verdict_of(make_check("risky", is_dangerous=True))
        assert ("/risky/" in server.calls) == dangerous
    assert (row.state, "--dangerous" in row.reason) == (verdict, not dangerous)


@pytest.mark.scenario("judging/the-minutes-are-over", "judging/a-must-that-could-not-be-tested",
                      clauses=["judging/the-exit-code-says-what-is-known#1,2"])  # fmt: skip
def test_what_the_minutes_leave_out_is_not_a_pass():
    with small_server() as server:
        judgement = judgement_of(server)
        assert (judgement.verdict_of(make_check("early")).state, judgement.exit_code) == ("pass", 0)
        judgement.terms.budget_s = 0.0
        row = judgement.verdict_of(make_check("late"))
    assert (row.state, "--minutes" in row.reason, judgement.exit_code) == ("not-testable", True, 3)


@pytest.mark.scenario(
    "judging/a-server-that-answers-no-prompt", clauses=["judging/a-server-is-judged-by-its-url-alone#4"]
)
@pytest.mark.parametrize(
    "fields", [{"generate": lambda body: (500, {})}, {"generate": lambda body: (200, {})}, {"health": 503}]
)
def test_a_server_that_answers_no_prompt_is_not_judged(fields):
    with small_server(**fields) as server:
        judgement = judgement_of(server)
        row = judgement.verdict_of(make_check("any"))
    assert (row.state, row.reason, judgement.exit_code) == ("blocked-by", "preflight", 4)


@pytest.mark.scenario(clauses=["judging/a-verdict-names-one-cause#5"])
def test_the_next_check_waits_for_quiet():
    slow = []

    def generate(body):
        if slow:
            time.sleep(slow.pop())
        return 200, REPLY

    with small_server(generate=generate) as server:
        judgement = judgement_of(server)
        judgement.preflight.quiet_s = 0.01
        before = len(server.calls)
        judgement.verdict_of(make_check("heavy", ask=lambda talk: slow.extend([0.6, 0.6])))
    assert slow == []
    assert server.calls[before:].count("/generate/") >= 3


@pytest.mark.scenario("judging/a-report-of-a-miss", clauses=["judging/a-miss-can-be-seen-again#1"])
def test_a_miss_is_reported_with_all_that_was_sent():
    def ask(talk):
        talk.generate("many", [f"prompt {i}" for i in range(100)])
        talk.note("reason", "too few")

    with small_server() as server:
        judgement = judgement_of(server)
        judgement.verdict_of(make_check("many", ask=ask))
    report = report_of(judgement)
    [entry] = report["checks"]
    [call] = entry["calls"]
    assert len(call["sent"]["prompts"]) == 100
    assert (entry["id"], entry["verdict"], entry["sentence"]) == ("servers/many", "must", "many holds.")
    assert call["reply"] == REPLY
    assert entry["again"] == f"rollmatch-judge {server.url} --dialect trl --check many"
    sent = shlex.split(entry["curl"])[-1]
    assert json.loads(sent) == call["sent"]
    assert report["exit_code"] == 1


def test_profiles_hold_what_can_be_tested_by_their_means():
    bare = checks_of("trl", profile="http", lacks=lambda needs: ", ".join(needs))
    assert bare
    assert not any(check.needs or check.is_dangerous for check in bare)
    with_model = {check.check_id for check in checks_of("trl", profile="http")}
    weights = {check.check_id for check in checks_of("trl", profile="weights")}
    full = {check.check_id for check in checks_of("trl", profile="full")}
    assert {check.check_id for check in bare} < with_model < weights < full
    assert full == {check.check_id for check in CHECKS if "trl" in check.dialects and "process" not in check.needs}
    with pytest.raises(UnknownCheck, match="no-such"):
        checks_of("trl", only=["no-such"])


@pytest.mark.parametrize(("missing", "is_asked"), [((), True), (("pictures",), False), (("model", "pictures"), True)])
def test_what_the_model_is_not_made_for_is_no_part_of_a_profile(monkeypatch, missing, is_asked):
    """Without any model nobody knows its kind: then it is asked for, as not testable."""
    sees = make_check("sees", needs=("model", "pictures"))
    monkeypatch.setattr("conformance.judge.servers.profiles.checks_for", lambda dialect, **_: [sees])
    asked = checks_of("trl", profile="weights", lacks=lambda needs: ", ".join({*needs} & {*missing}))
    assert asked == [sees] * is_asked


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_a_check_requires_comes_before_it_and_danger_last(dialect):
    order = [check.check_id for check in checks_of(dialect)]
    for check in checks_of(dialect):
        required = [name for name in required_by(check) if name in order]  # some are not of every dialect
        assert all(order.index(name) < order.index(check.check_id) for name in required), check.check_id
    assert all(name in BY_ID for check in CHECKS for name in check.requires)
    flags = [BY_ID[name].is_dangerous for name in order]
    assert flags == sorted(flags)


@pytest.mark.scenario(clauses=["judging/the-exit-code-says-what-is-known#1,2"])
@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["pass", "known-gap", "should"], 0),
        (["pass", "must", "not-testable"], 1),
        (["stale-gap"], 1),
        (["pass", "blocked-by"], 3),
        (["harness-error", "not-testable"], 5),
        (["harness-error", "must"], 1),
    ],
)
def test_exit_codes(states, code):
    rows = [VerdictRow(check=make_check("x"), state=state, reason="", seconds=0.0) for state in states]
    assert exit_code(rows) == code
    assert exit_code([VerdictRow(check=make_check("x", grade=SHOULD), state="not-testable", reason="", seconds=0)]) == 0
