"""``rollmatch-judge`` as people run it: from its wheel, without torch, in a directory of their own."""

import html
import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from xml.etree import ElementTree

import jsonschema
import pytest
from transformers.utils.logging import enable_progress_bar

from conformance.doubles.digits import MODEL, ROOT
from conformance.doubles.judge_wheel import judge, start_judge
from conformance.doubles.judged import REPLY, small_server
from conformance.judge.rule_sets import NEWEST
from conformance.judge.servers.command import main
from conformance.judge.servers.policy import Policies
from conformance.judge.servers.reports import schema
from rollmatch import __version__
from rollmatch.cli.main import main as rollmatch

GOOD = ("health-with-and-without-slash", "routes-are-listed", "one-prompt-one-response")


@pytest.mark.scenario(clauses=["judging/an-implementation-proves-itself-by-vectors#1"])
def test_the_wheel_runs_vectors_without_torch_and_without_the_implementation(installed, tmp_path):
    plain = ROOT / "conformance/judge/vectors/plain_python.py"
    code = "from conformance.judge.vectors.command import run; run()"
    words = ["run", "--only", "seeds", "--only", "advantages", sys.executable, str(plain)]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "14 pass" in done.stdout


def named(*checks):
    return [word for check in checks for word in ("--check", check)]


@pytest.mark.scenario(
    "judging/a-bare-url",
    clauses=["judging/a-server-is-judged-by-its-url-alone#1", "judging/the-exit-code-says-what-is-known#3"],
)
def test_a_bare_url_is_judged_without_torch_and_without_the_implementation(installed, tmp_path):
    reports = ("--json", "all.json", "--junit", "all.xml", "--page", "all.html")
    with small_server() as server:
        code, output = judge(installed, tmp_path, server.url, "--minutes", "3", *reports)
    report = json.loads((tmp_path / "all.json").read_text())
    verdicts = {entry["id"].partition("/")[2]: entry["verdict"] for entry in report["checks"]}
    assert (code, report["exit_code"]) == (1, 1), output
    assert {name: verdicts[name] for name in GOOD} == dict.fromkeys(GOOD, "pass")
    assert verdicts["logprobs-fit-the-ids"] == "must"
    verdicts.pop("short-call-passes-long-one")  # the double may end its long responses before another call arrives
    assert not {"not-testable", "harness-error"} & {*verdicts.values()}, verdicts
    last = output.strip().splitlines()[-1]
    assert last.startswith("1: rules 2026-12: a MUST is missed, or a known gap is stale; ")
    assert " checks were not asked: " in last
    assert " need --model, " in last
    assert "--model" in report["not_asked"]["servers/greedy-equals-transformers"]
    assert "servers/greedy-equals-transformers</dt><dd>needs --model" in (tmp_path / "all.html").read_text()
    assert "not asked: needs --model" in (tmp_path / "all.xml").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"all.json", "all.xml", "all.html"}


def test_both_wheels_have_one_version():
    judge = tomllib.loads((ROOT / "conformance/judge/pyproject.toml").read_text())["project"]
    assert judge["version"] == __version__
    assert judge["optional-dependencies"]["weights"] == [f"rollmatch=={__version__}"]


def test_reports_say_the_same(installed, tmp_path):
    paths = {name: tmp_path / f"r.{name}" for name in ("json", "junit", "page")}
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    wrong = ("wrong-method-is-405", "too-long-prompt-is-4xx", "version-is-returned")
    with small_server() as server:
        code, output = judge(installed, tmp_path, server.url, *words, *named(*GOOD, *wrong))
    entries = {entry["id"]: entry for entry in json.loads(paths["json"].read_text())["checks"]}
    assert (code, entries["servers/wrong-method-is-405"]["verdict"]) == (1, "must"), output
    assert entries["servers/too-long-prompt-is-4xx"]["verdict"] == "not-testable"
    suite = ElementTree.parse(paths["junit"]).getroot()
    assert [suite.get(name) for name in ("tests", "failures", "skipped", "errors")] == ["6", "1", "1", "0"]
    clause, sentence = (entries["servers/wrong-method-is-405"][name] for name in ("clause", "sentence"))
    assert suite.find("testcase/failure").text.startswith(f"{clause}\n{sentence}\n")
    page = paths["page"].read_text()
    for text in ("servers/wrong-method-is-405", "1 must", "curl -sS -i -X GET", clause, sentence):
        assert text in page
        assert text in output
    assert "http://" not in page.replace(server.url, "")


@pytest.mark.parametrize(
    ("words", "named_key"),
    [
        (["ftp://x"], "URL"),
        (["http://x", "--transport", "gloo"], "--transport"),
        (["http://x", "--group-host", "h"], "--group-host"),
        (["http://x", "--transport", "nccl", "--model", "m"], "--transport"),
        (["http://x", "--tolerance", "0.1"], "--tolerance"),
        (["http://x", "--model", "m", "--tolerance", "0"], "--tolerance"),
        (["http://x", "--model", "m", "--tolerance", "0.6"], "--tolerance"),
        (["http://x", "--json", "no/such/folder/r.json"], "--json"),
        (["http://x", "--json", "."], "--json"),
        (["http://x", "--known-gaps", "none.yaml"], "--known-gaps"),
        (["http://x", "--server-name", "swift"], "--server-name"),
        (["http://x", "--rules", "2026-01"], "argument --rules"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_called(words, named_key, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert (ended.value.code, f"error: {named_key}" in capsys.readouterr().err) == (2, True)


def test_a_model_is_refused_where_the_packages_for_it_are_not_installed(installed, tmp_path):
    code, output = judge(installed, tmp_path, "http://x", "--model", "m")
    assert (code, "error: --model" in output) == (2, True), output


@pytest.mark.scenario(clauses=["judging/the-exit-code-says-what-is-known#5"])
@pytest.mark.parametrize(
    ("words", "problem"),
    [([], "{url} cannot be judged: nothing answers there"), (["--check", "no-such-check"], "no check no-such-check")],
)
def test_what_cannot_be_judged_is_reported_with_the_reason(installed, tmp_path, words, problem):
    """An older report of the same name would else be taken for this run's."""
    files = {name: tmp_path / f"of-this-run.{name}" for name in ("json", "junit", "badge", "page")}
    for file in files.values():
        file.write_text("of an earlier run")
    with small_server() as server:
        url = server.url if words else "http://127.0.0.1:9"
        written = [word for name, file in files.items() for word in (f"--{name}", str(file))]
        code, output = judge(installed, tmp_path, url, *words, *written)
    problem = problem.format(url=url)
    report = json.loads(files["json"].read_text())
    jsonschema.validate(report, schema())
    assert (code, report["exit_code"], report["checks"], report["url"]) == (4, 4, [], url), output
    assert output.startswith(f"4: rules {NEWEST}: "), output
    assert problem in output
    assert problem in report["preflight"]["problem"]
    assert report["reproduce"].startswith(f"rollmatch-judge {url}")
    (case,) = ElementTree.parse(files["junit"]).getroot().iter("testcase")
    assert problem in case.find("error").get("message")
    assert "not judged" in files["badge"].read_text()
    assert problem in html.unescape(files["page"].read_text())


def test_gaps_come_from_a_file(installed, tmp_path):
    gap = "{check: wrong-method-is-405, reason: not yet, seen: '%s', link: https://example.org, expires: 2099-01-01}"
    ranged = "{server: 'small>=2,<3', gaps: [" + gap % "get: GET" + "]}"
    for text, name, wanted in (
        (f"- {gap % 'get: GET'}", "", (0, "1 known-gap")),
        (f"- {gap % 'a timeout'}", "", (1, "the known gap is another one: a timeout")),
        (ranged, "small-2.1", (0, "1 known-gap")),
        (ranged, "small-3.0", (1, "1 must")),
        (ranged, "", (4, "the server's version is not known")),
    ):
        (tmp_path / "gaps.yaml").write_text(text)
        words = ["--known-gaps", "gaps.yaml", *(["--server-name", name] if name else []), *named("wrong-method-is-405")]
        with small_server() as server:
            code, output = judge(installed, tmp_path, server.url, *words)
        assert (code, wanted[1] in output) == (wanted[0], True), output


def test_gaps_of_known_servers_are_installed(installed, tmp_path):
    with small_server() as server:
        words = ["--server-name", "trl-1.10.0", *named("version-is-returned")]
        code, output = judge(installed, tmp_path, server.url, *words)
    assert (code, "is listed as a gap: no route returns a version" in output) == (1, True), output


@pytest.mark.parametrize(
    ("version", "words", "hint"),
    [
        ("1.10.0", [], "this looks like trl-1.10.0, which has known gaps: add --server-name trl-1.10.0"),
        ("", [], "add --server-name trl-VERSION"),
        ("1.2", [], ""),
        ("of today", [], ""),
        ("1.10.0", ["--server-name", "trl-1.10.0"], ""),
        ("1.10.0", ["--known-gaps", "none.yaml"], ""),
    ],
)
def test_a_known_server_that_was_not_named_is_hinted_at(installed, tmp_path, version, words, hint):
    def generate(body):
        return (200, REPLY) if body["max_tokens"] > 0 else (500, "Internal Server Error")

    (tmp_path / "none.yaml").write_text("[]")
    with small_server(generate=generate, version=version) as server:
        _, output = judge(installed, tmp_path, server.url, *words, *named("bad-sampling-value-is-4xx"))
    hints = [line for line in output.splitlines() if "--server-name" in line]
    assert (len(hints), hint in "".join(hints)) == (int(bool(hint)), True), output


def test_a_judge_that_is_ended_still_writes_its_report(installed, tmp_path):
    asked, ended = threading.Event(), threading.Event()

    def generate(body):
        if body["max_tokens"] == 8 and asked.num_calls > 0:
            asked.set()
            ended.wait(60)
        asked.num_calls += 1
        return 200, REPLY

    asked.num_calls = 0
    with small_server(generate=generate) as server:
        checks = named("one-prompt-one-response")
        process = start_judge(installed, tmp_path, server.url, "--json", "r.json", *checks)
        assert asked.wait(60)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        ended.set()
    report = json.loads((tmp_path / "r.json").read_text())
    assert (process.returncode, "not finished" in output) == (130, True), output
    assert (report["checks"], report["exit_code"]) == ([], 3)


def test_a_report_that_cannot_be_written_is_no_miss_of_the_server(installed, tmp_path):
    with small_server() as server:
        code, output = judge(installed, tmp_path, server.url, "--json", "/dev/full", *named("routes-are-listed"))
    assert (code, "No space left on device" in output) == (5, True), output


def test_the_main_command_hands_over_or_names_the_package(monkeypatch, capsys):
    command = [sys.executable, "-m", "rollmatch", "judge", "http://127.0.0.1:9"]  # which changes its environment
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 4
    monkeypatch.setitem(sys.modules, "conformance.judge.servers.command", None)
    assert rollmatch(["judge", "http://127.0.0.1:9"]) == 1
    assert "[judge-not-installed] servers: rollmatch-judge is not installed" in capsys.readouterr().err


def test_no_progress_bar_stands_between_the_verdicts(capfd):
    enable_progress_bar()
    assert Policies(MODEL).model is not None
    assert capfd.readouterr() == ("", "")
