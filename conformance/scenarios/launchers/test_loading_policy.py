"""A learner loads while it waits for its servers: the command itself, and a health route on a real socket."""

import signal
import sys
import time
from contextlib import suppress

import psutil
import pytest

from conformance.doubles.digits import CONFIG
from conformance.doubles.http_server import answering
from conformance.doubles.started import finish, started, train_command
from rollmatch.errors import LaunchError
from rollmatch.run.server_checks import wait_for_notice

WAIT_S = 240
TELLS_WHEN_LOADED = """
import sys
from pathlib import Path
from rollmatch.run import lifecycle as run
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
        output = run_train(tmp_path, url, script, loaded, tuner="tuner.lora_rank=4")
    assert loaded.exists(), output
    assert "server-unreachable" not in output, output


@pytest.mark.scenario(
    "launchers/a-policy-that-cannot-be-loaded-ends-the-wait",
    clauses=["launchers/the-learner-launcher-waits-for-a-server-that-is-really-there#7"],
)
def test_a_policy_that_cannot_be_loaded_ends_the_wait(tmp_path):
    began = time.monotonic()
    with answering(health_once(lambda: False)) as url:
        output = run_train(tmp_path, url, "-m", "rollmatch", tuner="tuner.target_regex=nothing")
    assert "adapter-targets-nothing" in output
    assert time.monotonic() - began < WAIT_S / 2


@pytest.mark.wide
@pytest.mark.scenario(
    "launchers/two-ranks-are-started-while-a-server-of-another-size-starts",
    clauses=["launchers/the-learner-launcher-waits-for-a-server-that-is-really-there#8,9"],
)
def test_two_ranks_are_started_while_a_server_starts_that_is_refused(tmp_path):
    """A server that is healthy once both ranks are there: who waited for it before would start none."""
    ranks = set()

    def are_started():
        if running is not None:
            ranks.update(ranks_of(running.process.pid))
        return len(ranks) == 2

    running, sizes = None, "custom.extra.rollout_server.vllm_data_parallel_size=1"
    with answering(health_once(are_started, world_size=2)) as url:
        words = (*overrides_of(tmp_path, url), sizes)
        flags = ("--gpus", "0,1", "--wait-timeout", str(WAIT_S))
        with started(train_command(*words, flags=flags), tmp_path / "learner.txt") as running:
            assert running.wait() == 1
            output = running.output()
    assert output.count("[world-size-mismatch]") == 1, output
    assert output.count("waiting for") == 1, output
    assert "Traceback" not in output, output
    assert psutil.wait_procs(ranks, timeout=20)[1] == []
    assert not (tmp_path / "run").exists()


def test_a_rank_whose_policy_cannot_be_loaded_waits_for_no_notice(tmp_path):
    def check():
        raise LaunchError("no policy", code="x")

    with pytest.raises(LaunchError, match="no policy"):
        wait_for_notice(tmp_path / "never", check)


@pytest.mark.scenario(clauses=["launchers/several-learner-gpus-mean-several-learner-processes#4"])
def test_a_signal_while_servers_are_waited_for_ends_all_at_once(tmp_path):
    with answering(health_once(lambda: False)) as url:
        command = train_command(*overrides_of(tmp_path, url), flags=("--gpus", "0,1"))
        with started(command, tmp_path / "learner.txt") as running:
            running.wait_until(lambda: ranks_of(running.process.pid))
            family = psutil.Process(running.process.pid).children(recursive=True)
            running.process.send_signal(signal.SIGINT)
            assert running.wait() == 128 + signal.SIGINT
            output = running.output()
    assert output.splitlines()[-1] == "rollmatch: stopped by signal 2 while it waited for servers"
    assert "Traceback" not in output, output
    assert psutil.wait_procs(family, timeout=20)[1] == []


def ranks_of(pid):
    """Processes below a launcher that torchrun has given a rank."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found += [process] if "LOCAL_RANK" in process.environ() else []
    return found


def health_once(is_healthy, *, world_size=1):
    """What a server answers, which is healthy once this is true."""

    def answer(name, _):
        reply = {"world_size": world_size} if "world" in name else {"status": "ok"}
        return (200 if is_healthy() else 503), reply

    return answer


def run_train(folder, url, *script, tuner):
    """Output of ``rollmatch train`` with a server at ``url``, which fails."""
    given = [*overrides_of(folder, url), "tuner.train_type=lora", tuner]
    words = ["train", str(CONFIG), "--wait-timeout", str(WAIT_S), *(word for each in given for word in ("--set", each))]
    code, output = finish([sys.executable, *map(str, script), *words], folder / "learner.txt")
    assert code != 0, output
    return output


def overrides_of(folder, url):
    vllm = "custom.extra.rollout_matching.vllm"
    server = (f"{vllm}.mode=server", f"{vllm}.server.base_url={url}", f"{vllm}.server.group_port=51216")
    return (f"training.output_dir={folder / 'run'}", *server)
