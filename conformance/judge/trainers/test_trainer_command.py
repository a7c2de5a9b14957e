"""``rollmatch judge-trainer`` as people run it: on commands of any kind."""

import json
import signal
import sys
import textwrap
import time
from xml.etree import ElementTree

import psutil
import pytest

from conformance.doubles.digits import ROOT
from conformance.doubles.processes import start
from rollmatch.cli.main import main as rollmatch

MODEL = ROOT / "fixtures/models/arithmetic"
GIVEN = ["--dialect", "trl", "--model", str(MODEL)]
SLEEPER = """
    import os, pathlib, subprocess, sys, time
    import requests

    requests.post(sys.argv[1] + "/generate/", json={"prompts": [[5, 6]], "max_tokens": 1})
    beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(sys.argv[2]).write_text(f"{os.getpid()} {beside.pid}")
    time.sleep(600)
"""


def begin(folder, *words):
    """The command, in a process of its own, and its output."""
    log = folder / "log.txt"
    return start([sys.executable, "-m", "conformance.judge.trainers.command", *map(str, words)], log), log


def judge(folder, *words):
    """Exit code and output."""
    process, log = begin(folder, *words)
    return process.wait(timeout=240), log.read_text()


@pytest.mark.scenario("judging/a-command-that-is-no-trainer", clauses=["judging/a-trainer-is-judged-by-what-arrives#4"])
def test_a_command_that_is_no_trainer_cannot_be_judged(tmp_path):
    paths = {name: tmp_path / f"r.{name}" for name in ("json", "junit", "page")}
    words = [word for name, path in paths.items() for word in (f"--{name}", path)]
    code, output = judge(tmp_path, *GIVEN, *words, "--", "false")
    report = json.loads(paths["json"].read_text())
    assert (code, report["exit_code"], "no rollout was requested" in output) == (4, 4, True), output
    assert "no call came: does the command use {url}, or ROLLMATCH_JUDGE_URL?" in output
    assert output.rstrip().endswith("the run ended with 1, and wrote nothing")
    assert ("blocked-by    " in output, {entry["verdict"] for entry in report["checks"]}) == (False, {"blocked-by"})
    assert {entry["reason"] for entry in report["checks"]} == {"preflight"}
    assert report["checks"][0]["again"].endswith(f"--check {report['checks'][0]['id'].partition('/')[2]} -- false")
    suite = ElementTree.parse(paths["junit"]).getroot()
    assert suite.find("testcase/error").get("message").startswith("no rollout was requested")
    assert "trainers/the-run-ends-well" in paths["page"].read_text()


def test_of_a_trainer_of_another_dialect_the_refused_call_is_named(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("import requests, sys; print('hello'); requests.post(sys.argv[1] + '/infer/', json={})\n")
    code, output = judge(tmp_path, *GIVEN, "--", sys.executable, script, "{url}")
    assert code == 4
    assert "calls: 1, refused: POST /infer/ -> 404" in output
    assert "the trl dialect has no route /infer" in output
    assert output.rstrip().endswith("the run ended with 0: hello")


@pytest.mark.scenario("judging/a-trainer-that-hangs", clauses=["judging/a-trainer-is-judged-by-what-arrives#5"])
def test_a_trainer_that_hangs_is_ended_with_all_that_it_has_started(tmp_path):
    script, pids = tmp_path / "sleeper.py", tmp_path / "pids"
    script.write_text(textwrap.dedent(SLEEPER))
    words = ["--limit", "5", "--json", tmp_path / "r.json", "--check", "the-run-ends-well"]
    code, output = judge(tmp_path, *GIVEN, *words, "--", sys.executable, script, "{url}", pids)
    [entry] = json.loads((tmp_path / "r.json").read_text())["checks"]
    assert (code, entry["verdict"]) == (1, "must"), output
    assert entry["reason"].startswith("the run did not end in time")
    assert [call["path"] for call in entry["calls"]] == ["/generate/"]
    assert len(entry["calls"][0]["reply"]["completion_ids"]) == 1
    assert not [pid for pid in map(int, pids.read_text().split()) if _runs(pid)]


def _runs(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (GIVEN, "COMMAND"),
        ([*GIVEN, "--steps", "2", "--", "x"], "--steps"),
        (["--dialect", "trl", "--model", "none", "--", "x"], "--model"),
        ([*GIVEN, "--check", "no-such-check", "--", "x"], "--check"),
        ([*GIVEN, "--json", "no/such/folder/r.json", "--", "x"], "--json"),
        ([*GIVEN, "--ranks", "0", "--", "x"], "--ranks"),
        ([*GIVEN, "--late", "-1", "--", "x"], "--late"),
        ([*GIVEN, "--limit", "0", "--", "x"], "--limit"),
        ([*GIVEN, "--minutes", "nan", "--", "x"], "--minutes"),
        ([*GIVEN, "--", "no-such-program", "{url}"], "COMMAND: there is no program no-such-program"),
        ([*GIVEN, "true"], "unrecognized arguments: true; COMMAND stands behind --"),
        (["--dialect", "openai", *GIVEN[2:], "--", "true"], "argument --dialect: invalid choice"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_started(words, key, capsys):
    with pytest.raises(SystemExit) as ended:
        rollmatch(["judge-trainer", *words])
    assert (ended.value.code, f"error: {key}" in capsys.readouterr().err) == (2, True)


def test_a_judge_that_is_ended_ends_the_trainer_and_writes_its_report(tmp_path):
    script, pids, report = tmp_path / "sleeper.py", tmp_path / "pids", tmp_path / "r.json"
    script.write_text(textwrap.dedent(SLEEPER))
    process, _ = begin(tmp_path, *GIVEN, "--json", report, "--", sys.executable, script, "{url}", pids)
    while not pids.exists() or not pids.read_text().endswith(tuple("0123456789")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 130
    assert json.loads(report.read_text())["checks"] == []
    assert not [pid for pid in map(int, pids.read_text().split()) if _runs(pid)]
