"""What ``rollmatch up`` reads of a Ray cluster and reserves there; nodes are numbers here."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from conformance.doubles.refusals import refused
from rollmatch.launch import ray_cluster
from rollmatch.launch.layout import ClusterGpus, Need

NODES = [
    {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 1.0}},
    {"Alive": True, "Resources": {"CPU": 2.0}},
    {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0, "accelerator_type:A100": 1.0}},
    {"Alive": True, "Resources": {"CPU": 2.0, "GPU": 2.0, "accelerator_type:H100": 1.0}},
]


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        (NODES, ClusterGpus(nodes=(4, 2), model="H100")),
        (NODES[1:2], ClusterGpus()),
        ([*NODES, {**NODES[2], "Alive": True}], ClusterGpus(nodes=(4, 2, 8))),
    ],
)
def test_gpus_are_those_of_the_nodes_that_live_and_have_any(monkeypatch, nodes, found):
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: nodes)
    assert ray_cluster.find_gpus() == found


@pytest.mark.parametrize(
    ("nodes", "gpus", "problem"),
    [
        (NODES, (4, 3), "learner to server-0 need 2 CPUs and 7 GPUs; 3 nodes have 12 CPUs and 6 GPUs"),
        (NODES, (1, 5), "server-0 needs 5 GPUs of one node, the largest has 4"),
        (NODES[1:2], (0,) * 3, "learner to server-1 need 3 CPUs; 1 nodes have 2 CPUs"),
        (NODES, (4, 2), None),
        (NODES[1:2], (3, 9), None),
    ],
)
def test_a_cluster_that_can_never_hold_the_run_is_refused_at_once(monkeypatch, nodes, gpus, problem):
    """Where it has no GPUs, each command takes a CPU."""
    bundles, removed = [], []
    group = SimpleNamespace(wait=lambda seconds: seconds == ray_cluster.PLACEMENT_S)
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_cluster, "placement_group", lambda made, strategy: (bundles.extend(made), group)[1])
    monkeypatch.setattr(ray_cluster, "remove_placement_group", removed.append)
    names = ("learner", "server-0", "server-1")
    needs = [Need(name=name, gpus=number) for name, number in zip(names, gpus, strict=False)]
    if problem:
        with refused("cluster-too-small", problem=problem), ray_cluster.reserved(needs):
            pass
        assert (bundles, removed) == ([], [])
        return
    with ray_cluster.reserved(needs) as made:
        assert made is group
    has_gpus = len(nodes) > 1
    assert bundles == [{"CPU": 1, "GPU": number} if has_gpus else {"CPU": 1} for number in gpus]
    assert removed == [group]
    group.wait = lambda _: False
    monkeypatch.setattr(ray_cluster.ray, "available_resources", lambda: {"CPU": 1.0, "GPU": 0.0}, raising=False)
    with refused("cluster-too-small", problem="only 1 CPUs were free"), ray_cluster.reserved(needs):
        pass


@pytest.mark.parametrize(
    ("typed", "variable", "used", "num_cpus"),
    [("a:1", "b:2", "a:1", None), (None, "b:2", "b:2", None), (None, None, "local", 9), ("", "", "local", 9)],
)
def test_a_cluster_is_the_named_one_or_this_machine_with_a_cpu_per_command(
    monkeypatch, typed, variable, used, num_cpus
):
    asked = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setattr(ray_cluster.os, "cpu_count", lambda: None)
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **given: asked.append(given))
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: asked.append("left"))
    with pytest.raises(KeyboardInterrupt), ray_cluster.connected(typed, min_cpus=9):
        raise KeyboardInterrupt
    given, left = asked
    assert (given["address"], given.get("num_cpus"), left) == (used, num_cpus, "left")
    assert (given["log_to_driver"], given.get("include_dashboard", False)) == (False, False)
    monkeypatch.setattr(ray_cluster.ray, "init", Mock(side_effect=ConnectionError("nobody")))
    with (
        refused("cluster-unreachable", "--address", problem=f"{used}: nobody"),
        ray_cluster.connected(typed, min_cpus=1),
    ):
        pass
