"""What a learner compares a rollout server with, how it waits for one, and what it sets for the libraries it loads."""

import json
import math
import os
import subprocess
import sys

import pytest

from conformance.doubles.configs import config_with
from conformance.doubles.http_server import answering
from conformance.doubles.refusals import refused
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.launch import learner
from rollmatch.launch.nodes import Placement
from rollmatch.run import machine, server_checks

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


@pytest.mark.parametrize("size", [{}, [2], {"world_size": "2"}, {"world_size": math.nan}, {"world_size": 0}])
def test_a_size_that_is_no_number_of_workers_is_refused(size):
    with answering(lambda name, _: (200, json.dumps(size))) as url, refused("reply-malformed", url):
        server_checks.check_server(RolloutServer(url, ClientSettings(timeout_s=5)), {}, config_with(), gpus=())


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


SETTING = """
import json, os, sys
from rollmatch.run.machine import set_environment
before = dict(os.environ)
set_environment(eager=bool(int(sys.argv[1])))
print(json.dumps({name: value for name, value in os.environ.items() if name.startswith("VLLM") or name not in before}))
"""


@pytest.mark.parametrize("eager", [True, False])
def test_libraries_find_their_settings_beside_what_the_user_has_set(eager):
    given = {"VLLM_LOGGING_LEVEL": "DEBUG", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SETTING, str(int(eager))]
    found = json.loads(subprocess.run(command, env=given, capture_output=True, check=True).stdout)
    on_cpu = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | ({"TORCHDYNAMO_DISABLE": "1"} if eager else {})
    assert found == {
        "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", **({} if machine.has_gpu() else on_cpu),
    }  # fmt: skip


def test_one_process_is_shown_with_its_gpu():
    shown = learner.shown_command("a b.yaml", ["--resume"], Placement())
    assert shown == f"CUDA_VISIBLE_DEVICES=0 {sys.executable} -P -m rollmatch train 'a b.yaml' --resume"
    assert " --standalone --nproc-per-node 2 " in learner.shown_command("a", [], Placement(gpus=("3", "4")))
