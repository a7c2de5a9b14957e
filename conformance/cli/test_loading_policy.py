"""A learner of one process loads its policy while it waits: the command itself, and a health route on a real socket."""

import subprocess
import sys
import time

import pytest

from conformance.doubles.http_server import answering
from conformance.rollout.digits import CONFIG

WAIT_S = 240
TELLS_WHEN_LOADED = """
import sys
from pathlib import Path
from rollmatch.cli import run
from rollmatch.cli.main import main
def read_policy(config, real=run.read_policy):
    policy = real(config)
    Path(sys.argv[1]).touch()
    return policy
run.read_policy = read_policy
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.scenario(
    "launchers/the-policy-is-loaded-while-the-server-starts",
    clauses=["launchers/the-learner-launcher-waits-for-a-server-that-is-really-there#6"],
)
def test_the_policy_is_loaded_while_a_server_starts(tmp_path):
    """A server that is healthy once the policy is loaded: who waited for it before would not load."""
    loaded, script = tmp_path / "loaded", tmp_path / "start.py"
    script.write_text(TELLS_WHEN_LOADED)
    with answering(health_once(loaded.exists)) as url:
        failed = run_train(tmp_path, url, script, loaded, tuner="tuner.lora_rank=4")
    assert loaded.exists()
    assert "server-unreachable" not in failed.stderr, failed.stderr


@pytest.mark.scenario(
    "launchers/a-policy-that-cannot-be-loaded-ends-the-wait",
    clauses=["launchers/the-learner-launcher-waits-for-a-server-that-is-really-there#7"],
)
def test_a_policy_that_cannot_be_loaded_ends_the_wait(tmp_path):
    began = time.monotonic()
    with answering(health_once(lambda: False)) as url:
        failed = run_train(tmp_path, url, "-m", "rollmatch", tuner="tuner.target_regex=nothing")
    assert "adapter-targets-nothing" in failed.stderr
    assert time.monotonic() - began < WAIT_S / 2


def health_once(is_healthy):
    """What a server of one worker answers, which is healthy once this is true."""

    def answer(name, _):
        reply = {"world_size": 1} if "world" in name else {"status": "ok"}
        return (200 if is_healthy() else 503), reply

    return answer


def run_train(folder, url, *script, tuner):
    """``rollmatch train`` with a server at ``url``, which fails."""
    given = [f"training.output_dir={folder / 'run'}", "tuner.train_type=lora", tuner]
    given += [f"custom.extra.rollout_matching.vllm.{each}" for each in ("mode=server", f"server.base_url={url}")]
    given.append("custom.extra.rollout_matching.vllm.server.group_port=51216")
    words = ["train", str(CONFIG), "--wait-timeout", str(WAIT_S), *(word for each in given for word in ("--set", each))]
    failed = subprocess.run([sys.executable, *map(str, script), *words], capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    return failed
