"""``rollmatch train --gpus``, and the waiting for rollout servers: a health route on a real socket is the server."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from conformance.doubles.digits import CONFIG, write_cut
from conformance.doubles.health_server import config_for, serving
from conformance.doubles.refusals import refused
from conformance.doubles.started import HF, journal_of, started, train_command
from rollmatch.cli.main import main
from rollmatch.errors import LaunchError
from rollmatch.launch.processes import parse_gpus, run_child, shell_line
from rollmatch.run.server_checks import WaitPolicy, wait_for_servers
from rollmatch.server.settings import KEY_VARIABLE

SIZES = "custom.extra.rollout_server.vllm_data_parallel_size=3"


@pytest.fixture
def nobody():
    """A URL where nobody listens."""
    with serving() as url:
        pass
    return url


@pytest.mark.parametrize("text", ["", "0,,1", "0,0", "a", "-1"])
def test_a_list_of_gpus_holds_numbers_or_names_of_the_driver(text):
    with refused("gpu-list-invalid", "--gpus"):
        parse_gpus(text)
    assert parse_gpus("3, 1,GPU-ab12") == ("3", "1", "GPU-ab12")


@pytest.fixture
def looks_often(monkeypatch):
    """A launcher that polls seven times a second."""
    monkeypatch.setattr("rollmatch.run.server_checks.LOOK_S", 0.15)


@pytest.mark.scenario(
    "launchers/the-server-comes-up-in-time",
    clauses=["launchers/the-learner-launcher-waits-for-a-server-that-is-really-there#1"],
)
def test_a_server_that_comes_up_in_time_is_waited_for(looks_often, capsys, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "mine")
    with serving(after_s=0.9, key="mine") as url:
        began = time.monotonic()
        wait_for_servers(config_for(url, SIZES), WaitPolicy(timeout_s=30))
    assert 0.6 < time.monotonic() - began < 20
    assert capsys.readouterr().out == f"waiting for {url} to be healthy, 30 s at most\n"


@pytest.mark.scenario(
    "launchers/the-server-does-not-come-up",
    clauses=["launchers/the-learner-launcher-waits-for-a-server-that-is-really-there#2"],
)
def test_a_server_that_does_not_come_up_ends_the_waiting_in_time(nobody):
    began = time.monotonic()
    with refused("server-unreachable", nobody, problem="ConnectionRefusedError"):
        wait_for_servers(config_for(nobody), WaitPolicy(timeout_s=2))
    assert 2 <= time.monotonic() - began < 5.5  # waiting three times as long would be 6


@pytest.mark.scenario(clauses=["launchers/the-learner-launcher-waits-for-a-server-that-is-really-there#3"])
def test_the_end_of_the_servers_process_ends_the_waiting(nobody, looks_often):
    server = subprocess.Popen(["sleep", "0.4"])
    began = time.monotonic()
    with refused("server-process-died") as caught:
        wait_for_servers(config_for(nobody), WaitPolicy(timeout_s=60, server_pid=server.pid))
    server.wait()
    assert (caught.value.code, caught.value.key) == ("server-process-died", "--server-pid")
    assert time.monotonic() - began < 15


@pytest.mark.scenario(
    "launchers/a-server-of-another-size",
    clauses=["launchers/the-learner-launcher-waits-for-a-server-that-is-really-there#4"],
)
@pytest.mark.parametrize(
    ("size", "wrong", "right", "parts"),
    [
        (SIZES, 2, 3, ("2", "3")),
        (
            "custom.extra.rollout_server.vllm_tensor_parallel_size=2",
            3,
            4,
            ("a multiple of vllm_tensor_parallel_size 2",),
        ),
    ],
)
def test_a_server_of_another_size_is_refused_and_one_of_ours_is_taken(size, wrong, right, parts):
    with serving(wrong) as url, refused("world-size-mismatch", "custom.extra.rollout_server") as caught:
        wait_for_servers(config_for(url, size), WaitPolicy(timeout_s=5))
    assert all(part in caught.value.problem for part in parts)
    with serving(right) as url:
        wait_for_servers(config_for(url, size), WaitPolicy(timeout_s=5))


@pytest.mark.scenario(
    "launchers/two-gpus-two-ranks", clauses=["launchers/several-learner-gpus-mean-several-learner-processes#1,2"]
)
def test_a_dry_run_prints_torchrun_and_the_gpus_and_starts_nothing(capsys, tmp_path):
    overrides = ("--set", f"training.output_dir={tmp_path / 'run'}")
    assert main(["train", str(CONFIG), "--gpus", "6,7", "--dry-run", "--resume", *overrides]) == 0
    output = capsys.readouterr().out
    assert output.startswith("CUDA_VISIBLE_DEVICES=6,7 ")
    assert f"torchrun --standalone --nproc-per-node 2 --no-python {sys.executable} -u -P -m rollmatch train" in output
    assert output.rstrip().endswith("--resume")
    assert not (tmp_path / "run").exists()
    assert main(["train", str(CONFIG), "--gpus", "3", "--dry-run"]) == 0
    assert "torchrun" not in capsys.readouterr().out


KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
SIGNALLED = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getppid(), signal.SIGTERM)
signal.sigwait([signal.SIGTERM])
raise SystemExit(%d)
"""
"""Has its launcher stopped, and ends when the signal has been passed on."""


@pytest.mark.scenario(clauses=["launchers/several-learner-gpus-mean-several-learner-processes#3"])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        *(("raise SystemExit(3)", 3), ("raise SystemExit(0)", 0), (KILL, 128 + signal.SIGKILL)),
        *((SIGNALLED % 0, 0), (SIGNALLED % 3, 128 + signal.SIGTERM)),
    ],
    ids=["failed", "finished", "killed", "finished in spite of a signal", "ended by a signal"],
)
def test_a_launcher_ends_with_its_childs_code(code, expected):
    assert run_child([sys.executable, "-c", code], {}) == expected
    assert shell_line(["run", "a b"], {"X": "1 2"}) == "X='1 2' run 'a b'"


LAUNCHER = (
    "import sys; from rollmatch.launch.processes import run_child; sys.exit(run_child(sys.argv[1:], {}, grace_s=0.5))"
)
STUBBORN = """
import signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(99)
"""


@pytest.mark.scenario(clauses=["launchers/several-learner-gpus-mean-several-learner-processes#4"])
def test_a_signal_leaves_nobody_behind_even_of_a_child_that_ignores_it():
    launcher = psutil.Popen([sys.executable, "-c", LAUNCHER, sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    assert launcher.stdout.readline() == b"up\n"
    family = launcher.children(recursive=True)
    assert len(family) == 2
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=30) == 128 + signal.SIGTERM
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_under_nohup_the_end_of_a_terminal_ends_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        child = "import os, signal; os.kill(os.getppid(), signal.SIGHUP); raise SystemExit(3)"
        assert run_child([sys.executable, "-c", child], {}) == 3
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_killed_launcher_takes_its_child_along():
    sleeping = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(99)"]
    launcher = psutil.Popen([sys.executable, "-c", LAUNCHER, *sleeping], stdout=subprocess.PIPE)
    assert launcher.stdout.readline() == b"up\n"
    (child,) = launcher.children()
    launcher.kill()
    launcher.wait()
    child.wait(timeout=30)


RANK = """
import os, time
from rollmatch.launch import learner
def line(text):  # in one write: torchrun's Python is unbuffered, and print writes the end of a line on its own
    os.write(1, f"{text}\\n".encode())
learner.wait_for_servers = lambda *_, **__: None
def checked(config):
    line(os.getpid())
    return [], []
def waits(*_, **__):
    line("waits")
    time.sleep(99)
learner.load_checked, learner.check_engine = checked, waits
learner.train(
    "fixtures/digits/digits.yaml", overrides=(), resume=False, overwrite=False, wait=learner.WaitPolicy()
)
"""


def test_a_killed_torchrun_takes_its_ranks_along(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(tmp_path / "rank.py")]
    launcher = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    lines = [launcher.stdout.readline() for _ in range(4)]
    assert lines.count(b"waits\n") == 2
    ranks = [psutil.Process(int(line)) for line in lines if line != b"waits\n"]
    launcher.kill()
    launcher.wait()
    for rank in ranks:
        rank.wait(timeout=30)


@pytest.mark.wide
def test_two_gpus_are_two_ranks_and_a_signal_leaves_a_checkpoint(tmp_path):
    out = tmp_path / "run"
    overrides = (*HF, f"training.output_dir={out}", "training.max_steps=60", "training.per_device_train_batch_size=2")
    few = ("training.eval_scenes=2", "training.save_steps=1000", "custom.extra.rollout_matching.max_new_tokens=8")
    small = f"model.model={write_cut(tmp_path / 'model')}"
    command = train_command(*overrides, *few, small, flags=("--gpus", "0,1"))
    with started(command, tmp_path / "output.txt") as running:
        running.wait_until(lambda: len(journal_of(out, "step")) >= 1)
        os.kill(running.process.pid, signal.SIGINT)
        assert running.wait() == 128 + signal.SIGINT, running.output()
    assert [event["learner_world_size"] for event in journal_of(out, "run")] == [2]
    step = journal_of(out, "interrupted")[0]["step"]
    assert (out / f"checkpoint-{step}" / "trainer_state.json").exists()


def test_an_error_of_a_check_ends_the_child():
    sleeping = [sys.executable, "-c", "import time; time.sleep(99)"]

    def check():
        children.update(psutil.Process().children())
        raise LaunchError("gone", code="server-process-died")

    children, before = set(), set(psutil.Process().children())
    with refused("server-process-died"):
        run_child(sleeping, {}, check=check)
    (child,) = children - before
    assert not child.is_running()
