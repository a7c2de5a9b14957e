"""Reports as data: their schema, badge, comparison and replay, and the rule sets that they name."""

import hashlib
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
import yaml

from conformance.doubles.digits import ROOT
from conformance.doubles.judge_wheel import judge
from conformance.doubles.judged import small_server
from conformance.judge.rule_sets import FOLDER as RULES
from conformance.judge.rule_sets import NEWEST, changes, rule_sets
from conformance.judge.servers.checks import CHECKS
from conformance.judge.servers.reports import schema
from conformance.judge.trainers.checks import CHECKS as TRAINER_CHECKS

SCHEMA = ROOT / "reports" / "report.schema.json"
KEPT = sorted((ROOT / "reports").rglob("*/*.json"))
MISSED, PASSED = "wrong-method-is-405", "health-with-and-without-slash"
RELEASED = {"2026-12": "b07742dc16f6ad4105ec54df043a8e3b43241b39f0f84e8763983b1ca9ec6a25"}
"""Set -> digest of the ids and levels that it was released with; a new set gets its line with its release."""
GAP = f"- {{check: {MISSED}, reason: not yet, seen: 'get: GET', link: https://example.org, expires: 2099-01-01}}\n"


@pytest.fixture(scope="module")
def reports(installed, tmp_path_factory):
    """Folder with ``good.json`` and ``bad.json``, of a check that passes and of both."""
    folder = tmp_path_factory.mktemp("reports")
    with small_server() as server:
        for name, checks in (("good", [PASSED]), ("bad", [PASSED, MISSED])):
            words = [word for check in checks for word in ("--check", check)]
            named = ("--server-name", "small-1.0", "--started-by", "small serve --port 8000")
            judge(installed, folder, server.url, "--json", f"{name}.json", *named, *words)
    return folder


@pytest.mark.scenario(clauses=["judging/a-report-is-data#1"])
def test_every_report_satisfies_the_schema(reports):
    written = json.loads(SCHEMA.read_text())
    assert written == schema()
    for path in [*KEPT, *reports.glob("*.json")]:
        jsonschema.validate(json.loads(path.read_text()), written)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(KEPT[0].read_text()) | {"format": 1}, written)


@pytest.mark.scenario(clauses=["judging/a-report-is-data#4"])
@pytest.mark.parametrize("path", KEPT, ids=[str(path.relative_to(ROOT / "reports")) for path in KEPT])
def test_a_kept_report_lies_where_its_name_says_and_says_how_to_reproduce_it(path):
    report = json.loads(path.read_text())
    name, _, version = report["server"].rpartition("-")
    assert path.relative_to(ROOT / "reports") == Path(report["rules"], name, f"{version}.json")
    assert report["reproduce"]
    assert str(ROOT) not in path.read_text()
    assert {entry["since"] for entry in report["checks"]} <= {*rule_sets()}


@pytest.mark.scenario(clauses=["judging/rules-are-dated#3"])
def test_a_report_names_its_rules_its_server_and_how_it_was_started(reports):
    report = json.loads((reports / "bad.json").read_text())
    assert (report["rules"], report["server"], report["dialect"]) == (NEWEST, "small-1.0", "trl")
    assert {entry["since"] for entry in report["checks"]} == {"2026-12"}
    started, judged = report["reproduce"].splitlines()
    assert (started, judged.split()[:2]) == ("small serve --port 8000", ["rollmatch-judge", report["url"]])
    assert f"--rules {NEWEST}" in judged


@pytest.mark.scenario("judging/a-report-is-judged-again", clauses=["judging/a-report-is-data#2"])
def test_a_report_is_judged_again_without_its_server(installed, reports, tmp_path):
    (tmp_path / "gaps.yaml").write_text(GAP)
    bad = str(reports / "bad.json")
    code, output = judge(installed, tmp_path, "replay", bad)
    assert (code, f"must           MUST   {MISSED}" in output) == (1, True), output
    code, output = judge(installed, tmp_path, "replay", bad, "--known-gaps", "gaps.yaml")
    assert (code, "1 known-gap" in output) == (0, True), output
    (tmp_path / "other.json").write_text("{}")
    assert judge(installed, tmp_path, "replay", "other.json")[0] == 4


@pytest.mark.scenario(clauses=["judging/the-exit-code-says-what-is-known#4"])
def test_the_last_line_names_known_gaps(installed, reports, tmp_path):
    (tmp_path / "gaps.yaml").write_text(GAP)
    with small_server() as server:
        words = (server.url, "--check", PASSED, "--check", MISSED)
        code, live = judge(installed, tmp_path, *words, "--known-gaps", "gaps.yaml", "--json", "r.json")
    code_again, replayed = judge(installed, tmp_path, "replay", str(reports / "bad.json"), "--known-gaps", "gaps.yaml")
    wanted = "every MUST of the profile passed, but for known gaps: 1"
    assert (code, code_again) == (0, 0), live + replayed
    assert live.splitlines()[-1] == f"0: rules {NEWEST}: {wanted}"
    assert replayed.splitlines()[-1] == f"0: {wanted}"
    assert json.loads((tmp_path / "r.json").read_text())["meaning"] == wanted
    _, good = judge(installed, tmp_path, "replay", str(reports / "good.json"))
    assert good.splitlines()[-1] == "0: every MUST of the profile passed"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ("badge", "good.json", "--out", "no/such/folder/b.svg"),
            "--out: no/such/folder/b.svg cannot be written: make the folder no/such/folder first",
        ),
        (("badge", "good.json", "--out", "."), "--out: ."),
        (("replay", "good.json", "--known-gaps", "none.yaml"), "--known-gaps: none.yaml"),
    ],
)
def test_what_cannot_be_written_or_read_is_wrong_usage(installed, reports, words, named):
    code, output = judge(installed, reports, *words)
    assert (code, named in output) == (2, True), output


@pytest.mark.scenario("judging/a-release-that-got-worse", clauses=["judging/a-report-is-data#3"])
def test_a_comparison_names_what_fails_that_did_not(installed, reports):
    names = ("good.json", "bad.json")
    for words, wanted in ((names, (1, "not asked -> must: get: GET")), (names[::-1], (0, "must -> not asked"))):
        code, output = judge(installed, reports, "compare", *words)
        assert (code, f"servers/{MISSED}: {wanted[1]}" in output) == (wanted[0], True), output


def test_checks_that_one_run_left_out_are_counted(installed, tmp_path):
    whole = json.loads((ROOT / "reports" / NEWEST / "vllm" / "0.32.0.json").read_text())
    left = [entry["id"] for entry in whole["checks"] if entry["verdict"] == "pass"][:2]
    checks = [entry for entry in whole["checks"] if entry["id"] not in left]
    part = whole | {"server": "", "checks": checks, "not_asked": {name: ["--model"] for name in left}}
    for name, report in (("whole", whole), ("part", part)):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    code, output = judge(installed, tmp_path, "compare", "whole.json", "part.json")
    last = [line.partition(" (")[0] for line in output.splitlines()[1:]]
    assert (code, last) == (
        0,
        ["2 further checks were asked for vllm-0.32.0", "0 verdicts differ, 0 checks fail that did not"],
    )
    code, output = judge(installed, tmp_path, "replay", "part.json")
    assert output.splitlines()[-1].endswith("; 2 checks were not asked: 2 need --model"), output


def test_gaps_of_versions_need_a_report_that_names_its_server(installed, reports, tmp_path):
    (tmp_path / "gaps.yaml").write_text(f"server: small>=1\ngaps:\n{GAP}")
    report = json.loads((reports / "bad.json").read_text())
    (tmp_path / "nameless.json").write_text(json.dumps(report | {"server": ""}))
    words = ("--known-gaps", "gaps.yaml")
    assert judge(installed, tmp_path, "replay", str(reports / "bad.json"), *words)[0] == 0
    code, output = judge(installed, tmp_path, "replay", "nameless.json", *words)
    assert (code, "judge it with --server-name NAME-VERSION" in output) == (4, True), output


@pytest.mark.parametrize(("name", "right"), [("good", "1 pass, 0 fail"), ("bad", "1 pass, 1 fail")])
def test_a_badge_names_rules_and_verdict(installed, reports, tmp_path, name, right):
    code, output = judge(installed, tmp_path, "badge", str(reports / f"{name}.json"))
    assert code == 0, output
    texts = [each.text for each in ElementTree.parse(tmp_path / "badge.svg").getroot().iter() if each.text]
    assert texts == [f"rollout rules {NEWEST}: {right}", f"rollout rules {NEWEST}", right]


@pytest.mark.scenario(clauses=["judging/rules-are-dated#1"])
def test_the_newest_set_has_every_check_at_its_level():
    newest = rule_sets()[NEWEST]
    assert dict(newest.servers) == {check.check_id: check.grade for check in CHECKS}
    assert dict(newest.trainers) == {check.check_id: check.grade for check in TRAINER_CHECKS}
    assert changes()[0] == ("2026-12", "servers", *next(iter(newest.servers.items())))


@pytest.mark.scenario(clauses=["judging/rules-are-dated#4"])
@pytest.mark.parametrize("date", rule_sets())
def test_a_released_set_is_as_it_was_released(date):
    rules = rule_sets()[date]
    digest = hashlib.sha256(json.dumps([rules.servers, rules.trainers], sort_keys=True).encode()).hexdigest()
    advice = f"{date} is released: put the change into a copy of its file with the next date (CONTRIBUTING.md)"
    assert digest == RELEASED.get(date, digest), advice
    assert date in RELEASED or date == NEWEST, (
        f"{date} has a successor, so that it is released: add its digest {digest}"
    )
    assert {*rules.servers} <= {check.check_id for check in CHECKS}, f"{advice}, and keep what asks it"


@pytest.mark.scenario("judging/rules-of-an-older-set", clauses=["judging/rules-are-dated#2"])
def test_a_server_is_judged_by_the_rules_that_are_named(installed, tmp_path):
    """A set of a later day, in a copy of the installed judge."""
    site = tmp_path / "site"
    shutil.copytree(installed, site)
    later = yaml.safe_load((RULES / f"{NEWEST}.yaml").read_text())
    del later["servers"][MISSED]
    later["servers"]["copies-of-a-prompt-differ"] = "MUST"
    (site / "conformance/judge/rules/2099-01.yaml").write_text(yaml.safe_dump(later))
    verdicts = {}
    with small_server() as server:
        for rules in ((), ("--rules", NEWEST)):
            judge(site, tmp_path, server.url, "--json", "r.json", "--minutes", "2", *rules)
            report = json.loads((tmp_path / "r.json").read_text())
            verdicts[report["rules"]] = {entry["id"]: entry["verdict"] for entry in report["checks"]}
    named = ("servers/copies-of-a-prompt-differ", f"servers/{MISSED}")
    assert [verdicts[NEWEST].get(name) for name in named] == ["should", "must"]
    assert [verdicts["2099-01"].get(name) for name in named] == ["must", None]
