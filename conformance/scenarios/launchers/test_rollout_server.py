"""What ``rollmatch serve`` checks and what it would start."""

import argparse
import contextlib
import json
import re
import shlex
import socket

import pytest

from conformance.doubles.digits import CONFIG, MODEL, ROOT, absolute, load_digits
from conformance.doubles.refusals import refused
from rollmatch.cli.main import main
from rollmatch.errors import RollmatchError
from rollmatch.interop.swift_cli import server_command
from rollmatch.launch import vllm_serve
from rollmatch.launch.layout import FORECAST, ClusterGpus, make_layout
from rollmatch.launch.rollout_server import make_command, serve
from rollmatch.server.settings import ServerSettings

VLLM, SERVER = "custom.extra.rollout_matching.vllm", "custom.extra.rollout_server"
ONE = (f"{VLLM}.mode=server", f"{VLLM}.server.base_url=http://127.0.0.1:8123", f"{VLLM}.server.group_port=51216")
TWO = (
    f"{VLLM}.mode=server",
    f'{VLLM}.server.base_url=["http://127.0.0.1:8123", "http://127.0.0.1:8124"]',
    f"{VLLM}.server.group_port=51216",
)


def command(*overrides, gpus=("0", "1", "2"), server_index=None, on_gpu=True, named=ONE):
    return make_command(load_digits(*named, *overrides), gpus=gpus, server_index=server_index, on_gpu=on_gpu)


def settings_of(made):
    return ServerSettings(**json.loads(made.words[-1]))


def refusal(*overrides, **fields):
    with pytest.raises(RollmatchError) as caught:
        command(*overrides, **fields)
    return caught.value.code, caught.value.key


@pytest.mark.scenario(
    "launchers/one-file-names-the-port-for-both-sides",
    clauses=["launchers/server-and-learner-have-a-launcher-each#4,7", "rollout-server/the-server-keeps-to-itself#1"],
)
def test_three_gpus_make_three_replicas_that_see_them():
    made = command()
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    settings = settings_of(made)
    assert (settings.port, settings.data_parallel_size, settings.gpus) == (8123, 3, ["0", "1", "2"])
    assert (settings.host, settings.max_model_len, settings.dtype) == ("127.0.0.1", 512, "float32")


@pytest.mark.scenario(
    "launchers/three-replicas-on-a-laptop", clauses=["launchers/machines-without-gpus-count-replicas#1"]
)
def test_without_gpus_the_list_counts_replicas():
    made = command(on_gpu=False)
    assert "CUDA_VISIBLE_DEVICES" not in made.environment
    assert made.environment["OMP_NUM_THREADS"] == "1"
    assert (settings_of(made).data_parallel_size, settings_of(made).gpus) == (3, [])


def test_an_eager_engine_on_a_cpu_compiles_nothing():
    compiled = f"{VLLM}.enforce_eager=false"
    made = command(on_gpu=False), command(compiled, on_gpu=False), command(on_gpu=True)
    assert ["TORCHDYNAMO_DISABLE" in each.environment for each in made] == [True, False, False]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_server_by_arguments_alone_is_eager_on_a_cpu_and_sees_its_gpus(monkeypatch, on_gpu):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    settings = ServerSettings(model="m", dtype="auto", max_model_len=8, port=1, data_parallel_size=2)
    made = vllm_serve.make_command(settings, on_gpu=on_gpu)
    assert ("TORCHDYNAMO_DISABLE" in made.environment) == (not on_gpu)
    assert ("OMP_NUM_THREADS" in made.environment) == (not on_gpu)
    assert settings_of(made).gpus == (["4", "6"] if on_gpu else [])


@pytest.mark.scenario(
    "launchers/six-workers-on-six-gpus", clauses=["launchers/the-server-launcher-checks-before-it-starts#2"]
)
def test_parallel_sizes_make_up_the_gpus():
    six = f"{SERVER}.vllm_data_parallel_size=6"
    assert refusal(six, gpus=tuple("01234")) == ("gpu-count-mismatch", f"{SERVER}.vllm_data_parallel_size")
    assert settings_of(command(six, gpus=tuple("012345"))).data_parallel_size == 6
    two = f"{SERVER}.vllm_tensor_parallel_size=2"
    assert refusal(two) == ("gpu-count-mismatch", f"{SERVER}.vllm_data_parallel_size")
    with refused("gpu-count-mismatch", problem="tensor parallel 2 x data parallel 1 = 2, but 1 GPUs are named"):
        command(two, gpus=("0",))
    assert settings_of(command(two, gpus=tuple("0123"))).data_parallel_size == 2


@pytest.mark.parametrize(("tensor", "data"), [(1, None), (2, None), (1, 3), (2, 3)])
def test_a_cluster_reserves_the_gpus_that_a_server_takes(tensor, data):
    sizes = (
        f"{SERVER}.vllm_tensor_parallel_size={tensor}",
        *([f"{SERVER}.vllm_data_parallel_size={data}"] if data else ()),
    )
    typed = argparse.Namespace(servers=2, learners=None, learner_nodes=None, **dict.fromkeys(FORECAST))
    layout = make_layout(load_digits(*ONE, *sizes), typed, ClusterGpus(nodes=(8, 8)))
    gpus = settings_of(command(*sizes, gpus=None)).gpus
    assert layout.servers == (len(gpus),) * 2 == (tensor * (data or 1),) * 2


def test_one_of_several_servers_is_named():
    assert refusal(named=TWO) == ("server-not-named", f"{VLLM}.server")
    assert refusal(named=TWO, server_index=2) == ("server-not-named", f"{VLLM}.server")
    assert refusal(named=TWO, server_index=-1) == ("server-not-named", f"{VLLM}.server")
    assert refusal(named=()) == ("server-not-named", f"{VLLM}.server")
    assert [settings_of(command(named=TWO, server_index=index)).port for index in (0, 1)] == [8123, 8124]


@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])
def test_a_url_without_a_port_names_that_of_its_scheme(scheme, port):
    named = (ONE[0], f"{VLLM}.server.base_url={scheme}://127.0.0.1", ONE[2])
    assert settings_of(command(named=named)).port == port


@pytest.mark.parametrize(
    ("url", "host", "is_warned"),
    [("node7:8123", "127.0.0.1", True), ("node7:8123", "0.0.0.0", False), ("localhost:8123", "::1", False)],
)
def test_a_server_that_its_learners_cannot_reach_says_so(capsys, monkeypatch, url, host, is_warned):
    monkeypatch.setenv("ROLLMATCH_API_KEY", "k")
    sets = [*absolute(), *ONE, f"{VLLM}.server.base_url=http://{url}", f"{SERVER}.host={host}"]
    assert serve(str(CONFIG), overrides=sets, gpus=["0"], dry_run=True) == 0
    assert (f"{SERVER}.host: 0.0.0.0" in capsys.readouterr().err) == is_warned


@pytest.mark.scenario(
    clauses=["launchers/ms-swift-can-be-the-server#1", "launchers/server-and-learner-have-a-launcher-each#6"]
)
def test_swift_gets_the_same_settings_by_its_own_names():
    values = (f"{SERVER}.vllm_gpu_memory_utilization=0.6", f"{SERVER}.vllm_max_model_len=600")
    config = load_digits(*ONE, f"{SERVER}.engine=swift", *values)
    made = server_command(config, gpus=("0", "1", "2"), server_index=None, on_gpu=True)
    assert made.words[:2] == ("swift", "rollout")
    options = dict(zip(made.words[2::2], made.words[3::2], strict=True))
    sizes = {"data_parallel_size": "3", "tensor_parallel_size": "1", "gpu_memory_utilization": "0.6"}
    sizes |= {"max_model_len": "600", "enable_lora": "false"}
    expected = {f"--vllm_{name}": value for name, value in sizes.items()} | {"--port": "8123"}
    assert {name: options[name] for name in expected} == expected


@pytest.mark.scenario(
    "launchers/a-hub-id-that-cannot-be-read",
    "launchers/a-busy-port-stops-the-launcher",
    clauses=["launchers/the-server-launcher-checks-before-it-starts#1,3,4"],
)
def test_a_busy_port_or_a_missing_model_stops_the_start():
    def start(*overrides):
        serve(str(CONFIG), overrides=[*absolute(), *ONE, *overrides], gpus=["0"], dry_run=False)

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with refused("port-in-use", problem=str(port)):
            start(f"{VLLM}.server.base_url=http://127.0.0.1:{port}")
    for missing in ("Qwen/Qwen3-VL-8B-Instruct", "/nowhere/tiny"):
        with refused("model-directory-missing", "model.model"):
            start(f"model.model={missing}")


@pytest.mark.scenario(
    "launchers/two-commands-and-one-file", clauses=["launchers/server-and-learner-have-a-launcher-each#1,3,4"]
)
def test_two_commands_take_one_file(capsys, monkeypatch):
    monkeypatch.setattr("rollmatch.launch.rollout_server.has_gpu", lambda: True)
    sets = [part for override in [*absolute(), *ONE] for part in ("--set", override)]
    assert main(["serve", str(CONFIG), "--gpus", "0,1,2", "--dry-run", *sets]) == 0
    served = shlex.split(capsys.readouterr().out)
    assert {"CUDA_VISIBLE_DEVICES=0,1,2", "rollmatch.serve.process"} <= set(served)
    assert "train" not in served
    assert main(["train", str(CONFIG), "--gpus", "3", "--dry-run", *sets]) == 0
    trained = shlex.split(capsys.readouterr().out)
    assert "CUDA_VISIBLE_DEVICES=3" in trained
    assert "train" in trained
    assert not {"serve", "rollmatch.serve.process"} & set(trained)


STARTS: dict[str, set[str]] = {
    name: set()
    for name in (
        *("check", "plan", "page", "compare", "eval", "export", "model", "data", "import-config", "schema"),
        *("doctor", "judge", "judge-trainer", "vectors"),
    )
} | {"train": {"learner"}, "serve": {"server"}, "vllm-serve": {"server"}, "up": {"learner", "server"}}


def shown_by(capsys, *arguments):
    """What a command prints; ``--help`` exits by itself."""
    with contextlib.suppress(SystemExit):
        assert main([*arguments]) == 0
    return capsys.readouterr().out


def sides_of(words):
    """What a printed command would start."""
    marks = {"learner": {"train"}, "server": {"serve", "vllm-serve", "rollout", "rollmatch.serve.process"}}
    return {side for side, names in marks.items() if names & set(words)}


@pytest.mark.scenario(
    "launchers/there-is-no-combined-command", clauses=["launchers/server-and-learner-have-a-launcher-each#2"]
)
def test_there_is_no_combined_command(capsys, monkeypatch):
    """A new command is added to ``STARTS``; one that starts something prints it with ``--dry-run``."""
    monkeypatch.setattr("rollmatch.launch.rollout_server.has_gpu", lambda: True)
    shown = shown_by(capsys, "--help")
    commands = re.findall(r"^    ([a-z][\w-]*)(?= |$)", shown, flags=re.MULTILINE)
    assert sorted(commands) == sorted(STARTS)
    sets = [part for override in [*absolute(), *ONE] for part in ("--set", override)]
    for name, started in STARTS.items():
        assert ("--dry-run" in shown_by(capsys, name, "--help")) == bool(started)
        if started:
            what = ("--model", str(MODEL)) if name == "vllm-serve" else (str(CONFIG), *sets)
            assert sides_of(shlex.split(shown_by(capsys, name, *what, "--dry-run"))) == started
    scripts = {path.name: path.read_text() for path in (ROOT / "scripts").glob("*.sh")}
    starting = {
        name: {word for word in ("serve", "train") if f'/with_equals" {word} ' in text}
        for name, text in scripts.items()
    }
    assert starting == {"serve.sh": {"serve"}, "train.sh": {"train"}}
