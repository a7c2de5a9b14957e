"""What a server reads of its model, and how it ends where it cannot listen."""

import json
import subprocess
import sys

import pytest

from rollmatch.serve import process as server_process
from rollmatch.serve import serving
from rollmatch.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("described", "size"),
    [({"vocab_size": 7, "text_config": {"vocab_size": 9}}, 7), ({"text_config": {"vocab_size": 9}}, 9)],
)
def test_the_vocabulary_has_the_rows_that_the_model_names(tmp_path, described, size):
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert serving.vocabulary_size(str(tmp_path)) == size


def test_a_server_that_cannot_listen_as_configured_says_why_and_ends_with_1(capsys):
    settings = ServerSettings(model="m", dtype="auto", max_model_len=8, port=1, host="0.0.0.0")
    assert server_process.run(settings.to_json()) == 1
    assert "[open-without-key] host: everybody who reaches 0.0.0.0 could use it" in capsys.readouterr().err


FAILING = """
import runpy, sys
from rollmatch.server import settings

def fail(_):
    print("asking http://me:sesame@node7")
    raise ValueError("no route to http://me:sesame@node7/a?token=sesame")

settings.check_exposure = fail
runpy.run_module("rollmatch.serve.process", run_name="__main__", alter_sys=True)
"""


def test_what_a_server_writes_to_its_terminal_holds_no_credentials():
    settings = ServerSettings(model="m", dtype="auto", max_model_len=8, port=1).to_json()
    ended = subprocess.run(
        [sys.executable, "-c", FAILING, settings], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stdout == "asking http://***@node7\n"
    assert "ValueError: no route to http://***@node7/a?token=***" in ended.stderr
    assert "sesame" not in ended.stderr
