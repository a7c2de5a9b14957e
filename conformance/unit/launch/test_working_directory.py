"""Modules of the working directory that have names of Python's own or of installed ones: none is run."""

import os
import subprocess

import pytest

from conformance.doubles.digits import ROOT
from conformance.doubles.instance import settings_for
from rollmatch.launch.learner import learner_command
from rollmatch.launch.nodes import Placement
from rollmatch.launch.rollout_server import server_words

NAMES = ("random", "inspect", "statistics", "torch", "transformers", "yaml", "datasets", "code")
COMMANDS = {
    "server": server_words(settings_for(model="/no/model"), gpus=()),
    "learner": learner_command("no.yaml", [], Placement()),
    "two learner ranks": learner_command("no.yaml", [], Placement(gpus=("0", "1"))),
}


@pytest.mark.parametrize("name", ["server", "learner", pytest.param("two learner ranks", marks=pytest.mark.wide)])
def test_no_module_of_the_working_directory_replaces_another(name, tmp_path):
    for module in NAMES:
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write({module!r})\n")
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'impl'}{os.pathsep}{ROOT}"}
    ended = subprocess.run(
        COMMANDS[name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 1
    assert "[config-file-missing]" in ended.stderr or "[checkpoint-missing]" in ended.stderr, ended.stderr
    assert not (tmp_path / "mark").exists(), (tmp_path / "mark").read_text()
