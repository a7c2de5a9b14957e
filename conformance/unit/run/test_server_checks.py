"""What a learner compares a rollout server with, how it waits for one, and what it sets for the libraries it loads."""

import os
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from conformance.doubles.configs import config_with
from conformance.doubles.http_server import answering
from conformance.doubles.refusals import refused
from rollmatch.config.servers import server_section
from rollmatch.dialects.session import ClientSettings, RolloutServer, ServerUnreachable
from rollmatch.launch import learner
from rollmatch.launch.nodes import Placement
from rollmatch.run import connect, machine, server_checks

SERVER = "custom.extra.rollout_server"


@pytest.mark.parametrize(
    ("tp", "dp", "found", "fits"),
    [
        *((2, "3", 6, True), (2, "3", 5, False), (2, "3", 12, False)),
        *((2, "null", 6, True), (2, "null", 5, False), (1, "null", 5, True), (1, "1", 1, True)),
        (2, "3", None, True),
    ],
)
def test_a_server_has_the_configured_number_of_workers_or_a_multiple(tp, dp, found, fits):
    sizes = (f"{SERVER}.vllm_tensor_parallel_size={tp}", f"{SERVER}.vllm_data_parallel_size={dp}")
    size = {"world_size": found}
    with answering(lambda name, _: (200, size) if found and name == "get_world_size" else (404, {})) as url:
        server = RolloutServer(url, ClientSettings(timeout_s=5))
        if fits:
            server_checks.check_server(server, {}, config_with(*sizes), gpus=())
            return
        expected = str(2 * 3) if dp == "3" else "a multiple of vllm_tensor_parallel_size 2"
        with refused(
            "world-size-mismatch", SERVER, problem=f"has {found} workers, the configuration expects {expected}"
        ):
            server_checks.check_server(server, {}, config_with(*sizes), gpus=())


@pytest.mark.parametrize(
    ("url", "theirs", "code"),
    [
        *(("http://127.0.0.1:1", ["0", "2"], "gpus-overlap"), ("http://10.0.0.1:1", ["0", "2"], None)),
        *(("http://127.0.0.1:1", ["0"], None), ("http://127.0.0.1:1", None, None)),
    ],
)
def test_gpus_are_shared_by_the_processes_of_one_machine_only(url, theirs, code):
    if code is None:
        server_checks.check_gpus(url, {"gpus": theirs}, ["1", "2"])
        return
    with refused(code, "--gpus", problem="works on 0, 2, the learner was given 1, 2"):
        server_checks.check_gpus(url, {"gpus": theirs}, ["1", "2"])


@pytest.mark.parametrize(("value", "gpus"), [(None, []), ("", []), ("3", ["3"]), ("3,5", ["3", "5"])])
def test_the_learner_s_gpus_are_those_it_was_given(monkeypatch, value, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert server_checks.learner_gpus() == gpus


@pytest.mark.parametrize("rank", ["0", "1", None])
@pytest.mark.parametrize(
    ("limit_s", "waits", "said_s"), [(3.5, [1.0, 1.0, 1.0, 0.5], "4"), (1.0, [1.0], None), (0.0, [0.1], None)]
)
def test_health_is_awaited_in_looks_of_a_second(monkeypatch, capsys, rank, limit_s, waits, said_s):
    now, looks, check = [100.0], [], Mock()

    def look(seconds):
        looks.append(seconds)
        now[0] += seconds
        raise ServerUnreachable("not yet", remedy="Start it.")

    monkeypatch.setattr(server_checks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    server = SimpleNamespace(base_url="http://a:1", wait_until_healthy=look)
    with refused("server-unreachable", "http://a:1", problem=f"not healthy within {limit_s:g} s", remedy="Start it."):
        server_checks._await_health(server, check, deadline=100 + limit_s, limit_s=limit_s, server_pid=os.getpid())
    assert (looks, check.call_count) == (waits, len(waits))
    line = f"waiting for http://a:1 to be healthy, {said_s} s at most\n"
    assert capsys.readouterr().out == (line if said_s and rank != "1" else "")


def test_a_server_process_that_has_ended_is_not_awaited():
    gone = Mock(base_url="http://a:1")
    with refused("server-process-died", "--server-pid", problem=f"process {2**22 + 1} has ended"):
        server_checks._await_health(gone, lambda: None, deadline=0.0, limit_s=9.0, server_pid=2**22 + 1)
    gone.wait_until_healthy.assert_not_called()


@pytest.mark.parametrize("is_compared", [True, False])
def test_the_journal_says_whether_servers_were_asked_for_their_tensors(is_compared):
    sender, journal = Mock(), Mock()
    sender.check.return_value = is_compared
    connect._compare(sender, ["a", "b"], journal)
    journal.write.assert_called_once_with("tensors", number=2, are_compared_with_servers=is_compared)
    connect._compare(sender, ["a"], None)
    assert [call.args[0] for call in sender.check.call_args_list] == [["a", "b"], ["a"]]


@pytest.mark.parametrize(("limit", "used"), [("null", None), ("0", None), ("-1", None), ("0.5", 0.5)])
def test_a_call_has_no_limit_unless_it_is_above_zero(monkeypatch, limit, used):
    monkeypatch.setenv("ROLLMATCH_API_KEY", "")
    section = "~.vllm.server"
    address = (f"{section}.base_url=http://a:1", f"{section}.group_port=2")
    config = config_with("~.vllm.mode=server", *address, f"{section}.infer_timeout_s={limit}")
    settings = connect._client_settings(server_section(config))
    assert (settings.infer_timeout_s, settings.api_key) == (used, None)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("gpu", [True, False])
def test_libraries_find_their_settings_beside_what_the_user_has_set(monkeypatch, gpu, eager):
    monkeypatch.setattr(machine, "has_gpu", lambda: gpu)
    monkeypatch.setattr(machine.os, "environ", {"VLLM_LOGGING_LEVEL": "DEBUG"})
    machine.set_environment(eager=eager)
    on_cpu = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | ({"TORCHDYNAMO_DISABLE": "1"} if eager else {})
    assert machine.os.environ == {
        "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", **({} if gpu else on_cpu),
    }  # fmt: skip


def test_one_process_is_shown_with_its_gpu():
    shown = learner.shown_command("a b.yaml", ["--resume"], Placement())
    assert shown == f"CUDA_VISIBLE_DEVICES=0 {sys.executable} -m rollmatch train 'a b.yaml' --resume"
    assert " --standalone --nproc-per-node 2 " in learner.shown_command("a", [], Placement(gpus=("3", "4")))
