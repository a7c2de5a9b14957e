"""torchrun's words for a learner on several machines: what is refused before anything starts, and what is started."""

import os
import socket
import sys
from types import SimpleNamespace

import pytest

from conformance.doubles.configs import config_with
from conformance.doubles.digits import CONFIG
from conformance.doubles.health_server import config_for, serving
from conformance.doubles.instance import free_port
from conformance.doubles.refusals import refused
from rollmatch.cli.main import main, make_parser
from rollmatch.launch.nodes import (
    Nodes,
    Placement,
    check_endpoint,
    interface_variables,
    nodes_of,
)
from rollmatch.model.source import MANIFEST
from rollmatch.run import lifecycle as run
from rollmatch.run.server_checks import check_servers_reachable

TWO = "--nnodes 2 --node-rank 1"
VLLM = "custom.extra.rollout_matching.vllm"
BROKEN = [
    ("--nnodes 2", "nodes-incomplete", "--node-rank"),
    ("--node-rank 0", "nodes-incomplete", "--nnodes"),
    ("--rdzv-endpoint a:1", "nodes-incomplete", "--nnodes"),
    (TWO, "nodes-incomplete", "--rdzv-endpoint"),
    ("--nnodes 0 --node-rank 0 --rdzv-endpoint a:1", "out-of-range", "--nnodes"),
    ("--nnodes 2 --node-rank 2 --rdzv-endpoint a:1", "out-of-range", "--node-rank"),
    ("--nnodes 2 --node-rank -1 --rdzv-endpoint a:1", "out-of-range", "--node-rank"),
    *(
        (f"{TWO} --rdzv-endpoint {text}", "rdzv-endpoint-invalid", "--rdzv-endpoint")
        for text in ("a", "a:", ":1", "a:x", "a:0", "a:65536", "http://a:1", "a:1/b", "u@a:1", "::1:29500", "[::1]")
    ),
]


def options_of(words):
    return make_parser().parse_args(["train", "run.yaml", *words.split()])


def nodes(node_rank=0, host="127.0.0.1", port=29500):
    return Nodes(nnodes=2, node_rank=node_rank, host=host, port=port)


@pytest.mark.scenario(
    "launchers/half-of-the-words-is-refused",
    clauses=["launchers/a-learner-on-several-machines-is-started-by-torchrun-s-words#3"],
)
@pytest.mark.parametrize(("words", "code", "key"), BROKEN)
def test_words_that_do_not_go_together_are_refused(words, code, key):
    with refused(code, key):
        nodes_of(options_of(words))


def test_no_word_is_one_machine():
    assert nodes_of(options_of("")) is None
    assert nodes_of(options_of("--nnodes 1 --node-rank 0 --rdzv-endpoint a:1")).node_rank == 0
    assert Placement().is_launched is False
    assert Placement(gpus=("0", "1", "2"), nodes=nodes()).world_size == 6
    assert Placement(nodes=nodes()).num_processes == 1


@pytest.mark.scenario(
    "launchers/two-machines-two-commands",
    clauses=["launchers/a-learner-on-several-machines-is-started-by-torchrun-s-words#1,2"],
)
@pytest.mark.parametrize("endpoint", ["node0:29500", "10.0.0.1:29500", "[fd00::1]:29500", "Node0.example:29500"])
def test_a_dry_run_shows_torchrun_with_the_same_words(capsys, endpoint):
    words = [*f"{TWO} --rdzv-endpoint {endpoint} --gpus 0,1 --dry-run".split()]
    assert main(["train", str(CONFIG), *words]) == 0
    shown = capsys.readouterr().out.replace("'", "")
    launched = f"--nproc-per-node 2 --no-python {sys.executable} -u -P -m rollmatch"
    assert f"--rdzv-backend static {TWO} --rdzv-endpoint {endpoint.lower()} {launched}" in shown
    assert "--standalone" not in shown


TORCHRUN = """#!/bin/sh
printf '%s\\n' "$@" "interface=$GLOO_SOCKET_IFNAME" "threads=$OMP_NUM_THREADS" > "$0.seen"
exit 7
"""


@pytest.fixture
def torchrun(tmp_path, monkeypatch):
    """A command beside Python that notes its words and two variables; returns what it has noted."""
    command = tmp_path / "bin" / "torchrun"
    command.parent.mkdir()
    command.write_text(TORCHRUN)
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command.with_name("python")))
    return lambda: command.with_name("torchrun.seen").read_text().splitlines()


@pytest.mark.parametrize(("preset", "threads"), [(None, None), ("eth7", "5")])
def test_one_process_among_several_machines_is_started_by_torchrun(monkeypatch, tmp_path, torchrun, preset, threads):
    for name, value in (("GLOO_SOCKET_IFNAME", preset), ("OMP_NUM_THREADS", threads)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    endpoint = f"127.0.0.1:{free_port()}"
    words = f"--nnodes 2 --node-rank 0 --rdzv-endpoint {endpoint} --set training.output_dir={tmp_path / 'run'}"
    backend = ("--set", "custom.extra.rollout_matching.rollout_backend=hf", "--set", "training.packing=false")
    assert main(["train", str(CONFIG), *words.split(), *backend]) == 7
    *shown, interface, thread_line = torchrun()
    assert shown[shown.index("--rdzv-endpoint") + 1] == endpoint
    assert shown[shown.index("--nproc-per-node") + 1] == "1"
    assert interface == f"interface={preset or loopback_interface()}"
    assert thread_line == f"threads={threads or 1}"


def loopback_interface():
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def test_an_endpoint_that_this_machine_cannot_use_is_refused(monkeypatch):
    with refused("rdzv-endpoint-elsewhere", "--rdzv-endpoint"):
        check_endpoint(nodes(host="192.0.2.1"))
    with refused("rdzv-endpoint-unknown", "--rdzv-endpoint"):
        check_endpoint(nodes(host="nobody.invalid"))
    known = socket.getaddrinfo
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda host, port, **kinds: known("127.0.1.1", port, **kinds))
        with refused("rdzv-endpoint-elsewhere", "--rdzv-endpoint", problem="127.0.1.1 here, which others cannot reach"):
            check_endpoint(nodes(host="node0"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with refused("port-in-use", "--rdzv-endpoint", problem=str(port)):
            check_endpoint(nodes(port=port))
        assert check_endpoint(nodes(1, port=port)) == loopback_interface(), "node 0 listens there by now"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert interface_variables("eth0") == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert interface_variables("") == {}


@pytest.mark.parametrize(("address", "name"), [("127.0.0.1%lo", "scoped"), ("10.0.0.8", "")])
def test_the_interface_is_the_one_with_the_address_whatever_its_scope(monkeypatch, address, name):
    held = {"other": "10.0.0.9", "scoped": address}
    interfaces = {each: [SimpleNamespace(address=one)] for each, one in held.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: interfaces)
    assert check_endpoint(nodes(1)) == name


@pytest.mark.scenario(
    "launchers/a-server-named-by-loopback-for-two-machines",
    clauses=["launchers/a-learner-on-several-machines-is-started-by-torchrun-s-words#4"],
)
def test_servers_named_by_loopback_are_refused_on_several_machines(monkeypatch):
    config = config_with(
        "~.vllm.mode=server", "~.vllm.server.base_url=http://localhost:1", "~.vllm.server.group_port=2"
    )
    other = config_with("~.vllm.mode=server", "~.vllm.server.base_url=http://node7:1", "~.vllm.server.group_port=2")
    with refused("loopback-on-several-nodes", f"{VLLM}.server", problem="http://localhost:1"):
        check_servers_reachable(config, num_nodes=2)
    check_servers_reachable(config, num_nodes=1)
    check_servers_reachable(other, num_nodes=2)
    check_servers_reachable(config_with("~.vllm.mode=colocate"), num_nodes=2)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with refused("loopback-on-several-nodes"):
        check_servers_reachable(config)


def test_check_counts_ranks_of_all_machines(capsys):
    few = ("--set", "training.strategy=fsdp2")
    assert main(["check", str(CONFIG), "--nnodes", "2", "--gpus", "0,1"]) == 0
    assert "learner ranks: 4 on 2 nodes" in capsys.readouterr().out
    assert main(["check", str(CONFIG), "--nnodes", "1", *few]) == 1
    assert "[strategy-needs-ranks]" in capsys.readouterr().err
    with serving() as url:
        server = config_for(url).custom.extra.rollout_matching.vllm.server
    named = (f"{VLLM}.mode=server", f"{VLLM}.server.base_url={server.base_url}", f"{VLLM}.server.group_port=1")
    sets = [part for override in named for part in ("--set", override)]
    assert main(["check", str(CONFIG), "--nnodes", "2", *sets]) == 1
    assert "[loopback-on-several-nodes]" in capsys.readouterr().err


def test_a_rank_counts_those_of_all_machines(monkeypatch, capsys):
    """torchrun starts one process on each of two machines: what one rank alone may do is refused."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    server = "{base_url: 'http://a:1', group_port: 2}"
    named = ("mode=server", f"server={server}", "sync.mode=adapter", "enable_lora=true")
    overrides = ("tuner.train_type=lora", *(f"{VLLM}.{word}" for word in named))
    sets = [part for override in overrides for part in ("--set", override)]
    assert main(["train", str(CONFIG), "--wait-timeout", "0", *sets]) == 1
    assert "[adapter-with-several-ranks]" in capsys.readouterr().err


def test_ms_swift_s_learner_stays_on_one_machine(capsys):
    words = [*f"{TWO} --rdzv-endpoint a:1 --engine swift --dry-run".split()]
    assert main(["train", str(CONFIG), *words]) == 1
    assert "[swift-on-several-nodes] --engine" in capsys.readouterr().err
    assert "NNODES" not in os.environ


@pytest.mark.parametrize("is_there", [True, False])
def test_whether_the_first_evaluation_is_there_is_what_rank_0_sees(tmp_path, is_there):
    assert run.was_evaluated(tmp_path, SimpleNamespace(gather=lambda item: [is_there, item])) == is_there


@pytest.mark.parametrize("seen", [(True, True), (True, False)])
def test_a_checkpoint_that_another_machine_does_not_see_is_refused_on_every_rank(tmp_path, seen):
    (tmp_path / MANIFEST).touch()
    arguments = SimpleNamespace(per_device_train_batch_size=1, gradient_accumulation_steps=1, fsdp="", deepspeed=None)
    answers = iter([[tmp_path, None], list(seen)])
    ranks = SimpleNamespace(gather=lambda item: next(answers), learner_world_size=2)
    if all(seen):
        assert run._agree_on(None, arguments, ranks) == tmp_path
        return
    with refused("checkpoint-elsewhere", "training.output_dir", problem="rank 1 does not see"):
        run._agree_on(None, arguments, ranks)
