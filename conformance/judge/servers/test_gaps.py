"""Known gaps: what they excuse, and in which versions."""

from datetime import date, timedelta

import pytest

from conformance.judge.servers.check import MISSED, MUST, PASSED, SHOULD, UNTESTABLE, Check, CheckVerdict
from conformance.judge.servers.checks import BY_ID
from conformance.judge.servers.gaps import Gap, GapMalformed, load_gaps, settle

HEALTH = BY_ID["health-with-and-without-slash"]


@pytest.mark.parametrize(
    ("state", "grade", "seen", "settled"),
    [
        (PASSED, MUST, None, "pass"),
        (PASSED, MUST, "bare 500", "stale-gap"),
        (MISSED, MUST, None, "must"),
        (MISSED, SHOULD, None, "should"),
        (MISSED, MUST, "bare .00", "known-gap"),
        (MISSED, MUST, "no end", "must"),
        (MISSED, SHOULD, "no end", "should"),
        (UNTESTABLE, MUST, "bare 500", "not-testable"),
    ],
)
@pytest.mark.scenario(
    "judging/a-miss-for-another-reason-than-the-known-one", clauses=["judging/a-known-gap-excuses-one-reason#1,3"]
)
def test_gaps_excuse_what_is_missed_for_their_reason_and_go_stale(state, grade, seen, settled):
    check = Check(check_id="x", sentence="", ask=HEALTH.ask, judge=HEALTH.judge, grade=grade)
    gaps = {} if seen is None else {"x": Gap(check="x", reason="so", seen=seen, link="there")}
    found, reason = settle(check, CheckVerdict(state=state, reason="bad: 500, a bare 500"), gaps)
    assert found == settled
    assert ("another one: no end" in reason) == (seen == "no end")


@pytest.mark.scenario("judging/a-gap-that-has-expired", clauses=["judging/a-known-gap-excuses-one-reason#4"])
@pytest.mark.parametrize(("days", "settled"), [(0, "known-gap"), (-1, "must")])
def test_a_gap_excuses_nothing_after_its_day(days, settled):
    day = date.today() + timedelta(days=days)  # of this machine
    gap = Gap(check="x", reason="so", seen="500", link="there", expires=day)
    check = Check(check_id="x", sentence="", ask=HEALTH.ask, judge=HEALTH.judge)
    found, reason = settle(check, CheckVerdict(state=MISSED, reason="a bare 500"), {"x": gap})
    assert (found, f"expired on {day}" in reason) == (settled, days < 0)


def test_a_gap_names_a_check_a_reason_what_is_seen_and_a_link(tmp_path):
    path = tmp_path / "x.yaml"
    for entry, named in (
        ("no-such-check, reason: r, seen: s, link: l", "no-such-check"),
        (f"{HEALTH.check_id}, reason: r, seen: s", "link"),
        (f"{HEALTH.check_id}, reason: r, link: l", "seen"),
        (f"{HEALTH.check_id}, reason: r, seen: '(', link: l", "unterminated"),
        (f"{HEALTH.check_id}, versions: >=2", "cannot start any token"),
        (f"{HEALTH.check_id}, reason: r, seen: s, link: l", "expires: YYYY-MM-DD"),
    ):
        path.write_text(f"- {{check: {entry}}}\n")
        with pytest.raises(GapMalformed, match=named):
            load_gaps(path)
    path.write_text(f"- {{check: {HEALTH.check_id}, reason: r, seen: s, link: l, expires: 2027-03-01}}\n")
    assert load_gaps(path)[HEALTH.check_id].reason == "r"


RANGED = """
server: x>=1.5,<3
gaps:
- {{check: {0}, reason: old, seen: s, link: 'at/v{{version}}', versions: '<2'}}
- {{check: {0}, reason: new, seen: s, link: 'at/v{{version}}', versions: '{1}', lines: {{2.1.0: 7}}}}
"""


@pytest.mark.scenario(
    "judging/a-gap-of-some-versions-says-nothing-about-others", clauses=["judging/a-known-gap-excuses-one-reason#2"]
)
def test_gaps_hold_for_versions_in_their_range(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(RANGED.format(HEALTH.check_id, ">=2"))
    found = {
        version: [(gap.reason, gap.link) for gap in load_gaps(path, server=f"x-{version}").values()]
        for version in ("1.4", "1.5", "2.1.0", "2.9rc1", "3.0")
    }
    assert found == {
        "1.4": [],
        "1.5": [("old", "at/v1.5")],
        "2.1.0": [("new", "at/v2.1.0#L7")],
        "2.9rc1": [("new", "at/v2.9rc1")],
        "3.0": [],
    }
    path.write_text(RANGED.format(HEALTH.check_id, ">=1.7"))
    for server, problem in (("x-1.8", "several gaps"), ("", "version is not known"), ("y-2.0", "gaps of x, not of y")):
        with pytest.raises(GapMalformed, match=problem):
            load_gaps(path, server=server)
    path.write_text(RANGED.format(HEALTH.check_id, "two"))
    with pytest.raises(GapMalformed, match="versions: "):
        load_gaps(path, server="x-2.0")
