"""What both launchers look at before anything begins: counts, ports, models, GPUs of the other side."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from conformance.doubles.digits import CONFIG, MODEL, ROOT, absolute, load_digits
from conformance.doubles.http_server import answering
from conformance.doubles.instance import free_port
from conformance.doubles.refusals import refused
from rollmatch.cli.main import main
from rollmatch.launch.rollout_server import serve
from rollmatch.run.server_checks import WaitPolicy, wait_for_servers
from rollmatch.server.identity import load_model_identity

VLLM, SERVER = "custom.extra.rollout_matching.vllm", "custom.extra.rollout_server"


def named(url="http://127.0.0.1:8123", group=51216):
    return (f"{VLLM}.mode=server", f"{VLLM}.server.base_url={url}", f"{VLLM}.server.group_port={group}")


def sets(*overrides):
    return [part for override in absolute(*overrides) for part in ("--set", override)]


@pytest.fixture
def begun(monkeypatch):
    """Commands that a launcher would have become."""
    commands = []
    monkeypatch.setattr("rollmatch.launch.rollout_server.become", commands.append)
    return commands


@pytest.mark.scenario("launchers/the-form-with-equals-signs")
def test_the_script_starts_what_the_command_starts(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    config = ROOT / "fixtures/digits/3v1.yaml"
    assert main(["serve", str(config), "--gpus", "0,1,2", "--dry-run"]) == 0
    command = capsys.readouterr().out
    script = [ROOT / "scripts/serve.sh", f"config={config}", "gpus=0,1,2", "log_level=debug", "--", "--dry-run"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"} | {"PATH": path}
    done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=90)
    settings = json.loads(shlex.split(done.stdout)[-1]) if done.returncode == 0 else {}
    assert (settings.get("data_parallel_size"), settings.get("port")) == (3, 8000), done.stderr
    shown = [word for word in shlex.split(command) if word.startswith(("VLLM_LOGGING_LEVEL=", "TOKENIZERS_"))]
    assert sorted(shown) == ["TOKENIZERS_PARALLELISM=true", "VLLM_LOGGING_LEVEL=DEBUG"], "what the user has set stays"
    python = re.compile(rf"{re.escape(str(Path(sys.executable).parent))}/python[\d.]*")  # one program has several names
    assert python.sub("python", done.stdout) == python.sub("python", command)


def test_the_scripts_read_the_environment_as_well(tmp_path):
    """As the seeds' scripts do: config=... gpus=... bash scripts/train.sh; arguments come after the environment."""
    for name in ("rollmatch", "conda"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$0" "$@" level "$VLLM_LOGGING_LEVEL" | sed "s,.*/,,"\n')
        (tmp_path / name).chmod(0o755)

    def run(script, *arguments, **variables):
        environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"} | variables
        words = [ROOT / f"scripts/{script}.sh", *arguments]
        return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=30).stdout.strip()

    assert run("train", config="a.yaml", gpus="6,7") == "rollmatch train a.yaml --gpus 6,7 level"
    expected = "rollmatch train b.yaml --gpus 6,7 --wait-timeout 9 --resume level INFO"
    assert run("train", "config=b.yaml", "wait_timeout=9", "log_level=info", "--", "--resume", gpus="6,7") == expected
    wrapped = "conda run --no-capture-output -n ms rollmatch serve a.yaml --gpus 0 level"
    assert run("serve", "CONDA_ENV=ms", "gpus=0", config="a.yaml") == wrapped
    assert run("serve", "gpus=0", config="a.yaml", CONDA_ENV="ms") == wrapped


@pytest.mark.parametrize(("arguments", "missing"), [(["gpus=0"], "config="), (["config=x", "gpu=0"], "gpu=0")])
def test_the_script_names_what_is_wrong(arguments, missing):
    done = subprocess.run([ROOT / "scripts/serve.sh", *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert missing in done.stderr


@pytest.mark.scenario("launchers/six-workers-on-five-gpus")
def test_six_workers_on_five_gpus(capsys, begun):
    sizes = (f"{SERVER}.vllm_tensor_parallel_size=1", f"{SERVER}.vllm_data_parallel_size=6")
    asked = ["serve", str(CONFIG), *sets(*named(f"http://127.0.0.1:{free_port()}"), *sizes)]
    before = psutil.Process().children()
    status = main([*asked, "--gpus", "0,1,2,3,4"])
    err = capsys.readouterr().err
    assert status == 1
    assert f"[gpu-count-mismatch] {SERVER}.vllm_data_parallel_size: " in err
    assert {"6", "6,", "5"} <= set(err.split())
    assert begun == []
    assert psutil.Process().children() == before
    assert main([*asked, "--gpus", "0,1,2,3,4,5"]) == 0
    assert len(begun) == 1


@pytest.mark.scenario(clauses=["launchers/the-server-launcher-checks-before-it-starts#5"])
def test_the_group_port_is_left_alone(begun):
    with socket.create_server(("127.0.0.1", 0)) as held:
        held.setblocking(False)
        group = held.getsockname()[1]
        url = f"http://127.0.0.1:{free_port()}"
        serve(str(CONFIG), overrides=absolute(*named(url, group)), gpus=["0"], dry_run=False)
        with pytest.raises(BlockingIOError):
            held.accept()
    assert len(begun) == 1


def describing(**replies):
    """A rollout server that answers about itself, and nothing else."""
    return answering(lambda name, _: (200 if name in replies else 404, replies.get(name, {})))


def wait_for(url, *overrides, gpus=()):
    wait_for_servers(load_digits(*named(url), *overrides), WaitPolicy(timeout_s=5), gpus=gpus)


@pytest.mark.scenario(clauses=["launchers/server-and-learner-have-a-launcher-each#5"])
def test_a_gpu_of_both_sides_is_refused():
    with describing(health={"status": "ok", "gpus": ["0", "1", "2"]}) as server:
        with refused("gpus-overlap", "--gpus", remedy="than 2 for"):
            wait_for(server, gpus=("2", "3"))
        wait_for(server, gpus=("3",))
        wait_for(server)
    with describing(health={"status": "ok"}) as silent:
        wait_for(silent, gpus=("0",))


@pytest.mark.scenario(clauses=["launchers/the-learner-launcher-waits-for-a-server-that-is-really-there#5"])
def test_a_server_of_another_model_is_refused():
    digest = load_model_identity(MODEL, dtype="float32").digest
    with describing(health={"status": "ok"}, identity={"model": "/models/other", "model_digest": digest}) as server:
        wait_for(server)
        with refused("served-model-differs") as caught:
            wait_for(server, f"model.model={ROOT}/fixtures/models/tasks")
    assert (caught.value.code, caught.value.key) == ("served-model-differs", "model.model")
    assert "/models/other" in caught.value.problem
    with describing(health={"status": "ok"}) as another_dialect:
        wait_for(another_dialect)
