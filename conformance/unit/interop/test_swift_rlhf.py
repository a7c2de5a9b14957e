"""ms-swift's own learner, started by our command, trains with our server: one YAML, unmodified code on a CPU."""

import pytest
import requests

from conformance.doubles.division import GRPO, SMALL, named, typed
from conformance.doubles.instance import free_port
from conformance.doubles.started import finish, started
from conformance.doubles.swift_parser import put_on_the_path
from conformance.doubles.swift_rlhf import STEPS, check_steps

pytestmark = [pytest.mark.swift, pytest.mark.engine]


def test_swift_s_own_learner_trains_with_our_server(tmp_path, monkeypatch):
    put_on_the_path(tmp_path, monkeypatch)
    out, port = tmp_path / "run", free_port()
    overrides = (
        *(*named(GRPO, port, free_port()), *SMALL, f"training.output_dir={out}", f"training.max_steps={STEPS}"),
        *("custom.extra.grpo.num_generations=4", "training.learning_rate=0.01", "training.warmup_steps=0"),
    )
    learner = typed("train", GRPO, "1", overrides, "--engine", "swift", "--wait-timeout", "200")
    with started(typed("serve", GRPO, "0", overrides), tmp_path / "server.txt") as server:
        code, output = finish(learner, tmp_path / "learner.txt")
        assert code == 0, output[-3000:] + server.output()[-3000:]
        health = requests.get(f"http://127.0.0.1:{port}/health/", timeout=10).json()
    assert health["policy_version"] == STEPS
    check_steps(out)
