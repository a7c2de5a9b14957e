"""``rollmatch up``: what it types for a run on a cluster, what it refuses, and how it ends on this machine."""

import argparse
import importlib.util
import os
import signal
import socket
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import requests
from torch.distributed import TCPStore

from conformance.doubles.digits import CONFIG
from conformance.doubles.division import GRPO, MATCHING
from conformance.doubles.refusals import refused
from conformance.doubles.started import journal_of, started
from conformance.doubles.up_run import left_of, overrides_of, up
from rollmatch.cli.main import main
from rollmatch.config import load_config
from rollmatch.config.servers import pair_servers, server_section
from rollmatch.errors import LaunchError
from rollmatch.launch import up as up_command
from rollmatch.launch.run_commands import SERVER, RunWords
from rollmatch.plan.layout import Layout
from rollmatch.server.settings import KEY_VARIABLE


def words_of(path, *hosts, overrides=(), learners=1, nodes=1, resume=False, overwrite=False):
    options = argparse.Namespace(config=str(path), overrides=list(overrides), resume=resume, overwrite=overwrite)
    config = load_config(path, overrides)
    layout = Layout(num_learner_nodes=nodes, ranks_per_node=learners // nodes, servers=(3,) * len(hosts))
    words = RunWords(config=config, options=options, layout=layout)
    words.settle(hosts)
    return words


def config_of(words):
    """The configuration that a command line names."""
    return load_config(words[1], [word.removeprefix("--set=") for word in words if word.startswith("--set=")])


@pytest.mark.scenario(clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#1,2"])
@pytest.mark.parametrize(
    ("path", "hosts"), [(MATCHING, ("10.0.0.1", "10.0.0.1", "10.0.0.2")), (GRPO, ("fd00::1", "b"))]
)
def test_servers_and_learner_name_the_same_addresses(path, hosts):
    words = words_of(path, *hosts, overrides=["training.max_steps=3"])
    config = config_of(words.learner((), resume=False, node=0, endpoint=""))
    first = pair_servers(server_section(load_config(path)))[0]
    addresses = pair_servers(server_section(config))
    assert [address.host for address in addresses] == list(hosts)
    assert [address.base_url for address in addresses] == [words.url(index) for index in range(len(hosts))]
    assert [address.group_port for address in addresses] == [first.group_port + index for index in range(len(hosts))]
    assert config.training.max_steps == 3
    for index, host in enumerate(hosts):
        typed = words.server(index, ("4", "5"))
        assert typed[-4:] == ["--server", str(index), "--gpus", "4,5"]
        assert config_of(typed).custom.extra.rollout_server.host == host
        assert pair_servers(server_section(config_of(typed))) == addresses


def test_a_configuration_behind_a_link_is_the_one_that_nodes_read(tmp_path, monkeypatch):
    """``sub/..`` is not the working directory where ``sub`` is a link."""
    (tmp_path / "elsewhere/deep").mkdir(parents=True)
    (tmp_path / "sub").symlink_to(tmp_path / "elsewhere/deep")
    (tmp_path / "elsewhere/run.yaml").write_text(f"extends: {MATCHING}\n")
    monkeypatch.chdir(tmp_path)
    words = words_of("sub/../run.yaml", "10.0.0.1")
    assert config_of(words.server(0, ())) == config_of(words_of(MATCHING, "10.0.0.1").server(0, ()))


def test_ports_count_up_from_the_first_server_s_whose_url_may_name_none():
    section = "custom.extra.rollout_matching.vllm.server"
    urls, port = f"{section}.base_url=[http://127.0.0.1, http://127.0.0.1:9100]", f"{section}.group_port=[7000, 7100]"
    words = words_of(MATCHING, "10.0.0.1", "10.0.0.1", "10.0.0.2", overrides=[urls, port])
    addresses = pair_servers(server_section(config_of(words.server(0, ()))))
    assert [words.url(index) for index in range(3)] == [
        "http://10.0.0.1:8000",
        "http://10.0.0.1:8001",
        "http://10.0.0.2:8002",
    ]
    assert [address.group_port for address in addresses] == [7000, 7001, 7002]


@pytest.mark.parametrize("address", ["10.0.0.1", "127.0.1.1", "fd00::1"])
def test_a_server_listens_where_its_node_is(address):
    """127.0.1.1: Ray's address of a machine without a network whose /etc/hosts is Debian's."""
    assert config_of(words_of(MATCHING, address).server(0, ())).custom.extra.rollout_server.host == address


@pytest.mark.parametrize(("host", "address"), [("0.0.0.0", "10.0.0.1"), ("::", "fd00::1"), ("10.0.0.1", "10.0.0.1")])
def test_a_server_listens_where_the_yaml_says(host, address):
    words = words_of(MATCHING, address, overrides=[f"{SERVER}.host='{host}'"])
    assert config_of(words.server(0, ())).custom.extra.rollout_server.host == host


@pytest.mark.scenario(clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#15"])
@pytest.mark.parametrize("host", ["10.0.0.2", "::"])
def test_a_server_that_would_listen_elsewhere_is_refused(host):
    with refused("host-elsewhere", f"{SERVER}.host", problem=f"is {host}, and a server is placed at 10.0.0.1"):
        words_of(MATCHING, "10.0.0.1", overrides=[f"{SERVER}.host='{host}'"])


def test_a_server_without_gpus_gets_a_place_per_replica():
    assert words_of(MATCHING, "127.0.0.1").server(0, ())[-2:] == ["--gpus", "0,1,2"]


def test_ranks_and_flags_reach_the_learner():
    words = words_of(MATCHING, "127.0.0.1", learners=2, overwrite=True)
    assert words.learner((), resume=False, node=0, endpoint="")[-3:] == ["--gpus", "0,1", "--overwrite"]
    assert words.learner(("6", "7"), resume=True, node=0, endpoint="")[-3:] == ["--gpus", "6,7", "--resume"]
    assert words_of(MATCHING, "127.0.0.1").learner((), resume=False, node=0, endpoint="")[-1].startswith("--set=")
    assert words_of(MATCHING, "127.0.0.1", resume=True).learner((), resume=False, node=0, endpoint="")[-1] == "--resume"


def test_servers_that_others_reach_get_a_key(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert KEY_VARIABLE not in words_of(MATCHING, "127.0.0.1").environment
    words = words_of(MATCHING, "10.0.0.1")
    assert len(words.environment[KEY_VARIABLE]) > 30
    assert words.environment == words.environment
    assert words_of(MATCHING, "10.0.0.1").environment != words.environment
    open_to_all = words_of(MATCHING, "10.0.0.1", overrides=["custom.extra.rollout_server.allow_no_key=true"])
    assert KEY_VARIABLE not in open_to_all.environment
    monkeypatch.setenv(KEY_VARIABLE, "mine")
    assert words_of(MATCHING, "10.0.0.1").environment[KEY_VARIABLE] == "mine"


def test_ports_that_count_up_too_far_are_refused():
    base_url = "custom.extra.rollout_matching.vllm.server.base_url=http://127.0.0.1:65535"
    with pytest.raises(LaunchError, match="2 servers from ") as caught:
        words_of(MATCHING, "10.0.0.1", "10.0.0.2", overrides=[base_url])
    assert caught.value.code == "out-of-range"


@pytest.mark.scenario(
    "launchers/a-cluster-without-servers", clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#13"]
)
def test_a_configuration_without_servers_is_refused(capsys):
    assert main(["up", str(CONFIG)]) == 1
    assert "[server-not-used] custom.extra.rollout_matching.vllm.mode: " in capsys.readouterr().err


@pytest.mark.scenario(clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#14"])
def test_a_list_of_servers_that_would_not_be_read_is_refused(capsys, tmp_path):
    server = "custom.extra.rollout_matching.vllm.server"
    (tmp_path / "servers.yaml").write_text('[{base_url: "http://127.0.0.1:8000", group_port: 51216}]')
    named = (f"{server}.base_url=null", f"{server}.group_port=null", f"{server}.servers_file={tmp_path}/servers.yaml")
    assert main(["up", str(MATCHING), *(f"--set={override}" for override in named)]) == 1
    assert f"[servers-file-not-used] {server}.servers_file: is set" in capsys.readouterr().err


def test_without_ray_the_package_is_named(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    assert main(["up", str(MATCHING)]) == 1
    assert "[ray-missing] ray is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "set_to"), [((), "0"), (("--address", "127.0.0.1:1"), None)])
def test_a_cluster_of_this_machine_alone_stays_on_loopback(monkeypatch, capsys, words, set_to):
    from rollmatch.launch import ray_cluster  # imports Ray, for a second

    for name in (up_command.RAY_BEYOND_LOOPBACK, "RAY_ADDRESS"):
        monkeypatch.setenv(name, "1")  # so that what the command sets is undone
        monkeypatch.delenv(name)
    failed = LaunchError("nobody", code="cluster-unreachable")
    monkeypatch.setattr(ray_cluster, "connected", Mock(side_effect=failed))
    assert main(["up", str(MATCHING), "--servers", "1", *words]) == 1
    assert "[cluster-unreachable]" in capsys.readouterr().err
    assert os.environ.get(up_command.RAY_BEYOND_LOOPBACK) == set_to
    assert ray_cluster.connected.call_args.kwargs == {"min_cpus": 2}


def test_commands_of_named_numbers_are_shown_without_a_cluster(capsys):
    elsewhere = ["--address", "127.0.0.1:1", "--servers", "2", "--learners", "1", "--dry-run"]
    assert main(["up", str(MATCHING), *elsewhere]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines()] == ["serve", "serve", "train"]
    assert "--resume" not in shown


def test_a_held_port_is_free_for_the_ranks_rendezvous_only():
    """Seconds pass until ranks listen there, and every connection on the machine takes a free port."""
    from rollmatch.launch.ray_command import hold_port  # imports Ray, for a second

    with hold_port() as held, socket.socket() as other:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert TCPStore("127.0.0.1", port).get("key") == b"value"


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.scenario(
    "launchers/a-cluster-is-interrupted", clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#10,11"]
)
def test_an_interrupt_ends_the_run_on_this_machine_with_a_checkpoint_and_leaves_nothing(tmp_path):
    out = tmp_path / "run"
    http, overrides = overrides_of(out, steps=1000)
    variables = {"HOME": str(tmp_path)}  # Ray writes a token there, by which alone its own cluster is entered
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    variables |= {"XDG_CACHE_HOME": cache}  # what vLLM notes of model classes; else another process of it looks at them
    variables |= {"RAY_worker_niceness": "0"}  # as in ``ray_nodes``
    with started(up(*overrides), tmp_path / "up.txt", **variables) as running:
        running.wait_until(lambda: journal_of(out, "step"))
        assert requests.get(f"http://127.0.0.1:{http}/health/", timeout=10).status_code == 200
        family = psutil.Process(running.process.pid).children(recursive=True)
        running.process.send_signal(signal.SIGINT)
        code, output = running.wait(), running.output()
        assert code == 130, output[-3000:]
        assert len(family) > 4
        assert psutil.wait_procs(family, timeout=20)[1] == []
        assert left_of(running) == []
    [event] = journal_of(out, "interrupted")
    assert (out / f"checkpoint-{event['step']}").is_dir()
