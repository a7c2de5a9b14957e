"""What others take into their CI: the action's steps in bash, and the parts of the container."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest
import yaml

from conformance.doubles.digits import ROOT
from conformance.doubles.judged import small_server
from conformance.judge.rule_sets import NEWEST, rule_sets

JUDGE = ROOT / "conformance" / "judge"
ACTION = yaml.safe_load((JUDGE / "action.yml").read_text())
RECIPE = (JUDGE / "Containerfile").read_text()
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
FIELD = re.compile(r"\$\{\{ (inputs|github)\.([\w-]+) \}\}")
GAPS = """
- {check: wrong-method-is-405, reason: not yet, seen: 'get: GET', link: l, expires: 2099-01-01}
- {check: logprobs-fit-the-ids, reason: none, seen: 'ids and None', link: l, expires: 2099-01-01}
"""


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """Environment of a runner: a Python without the judge, and its source as the action's path.

    What the judge needs comes from the test's own environment, so that nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("runner")
    source = shutil.copytree(JUDGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "build"))
    venv.create(folder / "python")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "python" / "lib" / version / "site-packages"
    (site / "of_the_test.pth").write_text(sysconfig.get_path("purelib") + "\n")
    path = f"{folder / 'python' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return source, {"PATH": path, "HOME": str(folder)} | offline


def run_action(runner, folder, steps=ACTION["runs"]["steps"], **inputs):
    """The steps, as GitHub runs them: until one fails. Returns its exit code and all output."""
    source, environment = runner
    defaults = {name: str(about.get("default", "")) for name, about in ACTION["inputs"].items()}
    given = {name.replace("_", "-"): value for name, value in inputs.items()}
    values = {"inputs": defaults | given, "github": {"action_path": str(source)}}
    output = ""
    for step in steps:
        own = {name: FIELD.sub(lambda found: values[found[1]][found[2]], value) for name, value in step["env"].items()}
        assert step["shell"] == "bash"
        done = subprocess.run(
            [*BASH, step["run"]], cwd=folder, env=environment | own, capture_output=True, text=True, timeout=240
        )  # fmt: skip
        output += done.stdout + done.stderr
        if done.returncode:
            break
    return done.returncode, output


@pytest.mark.wide
@pytest.mark.scenario("judging/the-steps-of-the-action", clauses=["judging/others-run-the-judge-in-their-ci#1"])
def test_the_steps_of_the_action_judge_a_server(runner, tmp_path):
    (tmp_path / "gaps.yaml").write_text(GAPS)
    with small_server() as server:
        code, output = run_action(runner, tmp_path, url=server.url)
        assert (code, "1: rules 2026-12: a MUST is missed" in output) == (1, True), output
        code, output = run_action(runner, tmp_path, url=server.url, dialect="trl", gaps="gaps.yaml")
    report = json.loads((tmp_path / "rollmatch-judge" / "report.json").read_text())
    verdicts = {entry["id"].partition("/")[2]: entry["verdict"] for entry in report["checks"]}
    assert [verdicts[name] for name in ("wrong-method-is-405", "logprobs-fit-the-ids")] == ["known-gap"] * 2, output
    assert (report["rules"], report["dialect"]) == (NEWEST, "trl")
    written = {path.name for path in (tmp_path / "rollmatch-judge").iterdir()}
    assert written == {"report.json", "junit.xml", "badge.svg"}


@pytest.mark.scenario(clauses=["judging/others-run-the-judge-in-their-ci#2"])
def test_the_action_takes_the_gaps_that_are_known_of_a_server(runner, tmp_path):
    """``rollmatch-judge`` is replaced by a command that shows its arguments: the step is what is judged here."""
    shown = tmp_path / "bin" / "rollmatch-judge"
    shown.parent.mkdir()
    shown.write_text('#!/bin/sh\necho "$@"\n')
    shown.chmod(0o755)
    source, environment = runner
    path = f"{shown.parent}{os.pathsep}{environment['PATH']}"
    (step,) = [step for step in ACTION["runs"]["steps"] if step["name"] == "Judge"]
    for further, words in (({}, ""), ({"server_name": "vllm-0.32.0"}, " --server-name vllm-0.32.0")):
        code, output = run_action((source, environment | {"PATH": path}), tmp_path, [step], url="http://h:1", **further)
        assert (code, output.endswith(f"badge.svg{words}\n")) == (0, True), output


def test_the_action_judges_by_a_set_that_there_is():
    assert ACTION["inputs"]["rules"]["default"] in rule_sets()
    used = {
        found[2]
        for step in ACTION["runs"]["steps"]
        for value in step["env"].values()
        for found in FIELD.finditer(value)
    }
    assert used == {*ACTION["inputs"], "action_path"}
    assert not any("${{" in step["run"] for step in ACTION["runs"]["steps"])  # a value is never part of a script


def test_the_commands_of_the_container_install_and_start_the_judge(runner, tmp_path):
    """No container is built here: ``/src`` is a folder of the test, and nobody is added to the machine's users."""
    source, environment = runner
    shutil.copytree(source, tmp_path / "src")
    lines = [line.partition(" ")[::2] for line in RECIPE.splitlines() if line and not line.startswith("#")]
    assert [kind for kind, _ in lines] == ["FROM", "COPY", "RUN", "RUN", "USER", "WORKDIR", "ENTRYPOINT"]
    assert lines[1][1] == ". /src"
    install = lines[2][1].replace("/src", str(tmp_path / "src")).replace("pip install", "python -m pip install")
    subprocess.run(["sh", "-c", install], env=environment, check=True, timeout=240)
    assert not (tmp_path / "src").exists()
    started = [*json.loads(lines[-1][1]), "http://127.0.0.1:9", "--json", "report.json"]
    ended = subprocess.run(started, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "nothing answers there" in ended.stdout) == (4, True), ended
    assert "nothing answers there" in json.loads((tmp_path / "report.json").read_text())["preflight"]["problem"]
