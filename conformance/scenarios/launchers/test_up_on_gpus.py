"""``rollmatch up`` on a Ray cluster whose nodes count GPUs: which split is taken, and what would be started where.

No command is started but to print: a Ray node takes the number of its GPUs on trust.
"""

import argparse
import json
import time

import pytest

from conformance.doubles.digits import absolute
from conformance.doubles.division import GRPO, MATCHING
from conformance.doubles.ray_nodes import own_address, ray_nodes
from conformance.doubles.refusals import refused
from rollmatch.cli.main import main
from rollmatch.config import load_config
from rollmatch.launch.layout import ClusterGpus, make_layout, needs_of
from rollmatch.launch.run_commands import RunWords
from rollmatch.plan.layout import Layout

NUMBERS = {"servers": None, "learners": None, "learner_nodes": None}
LENGTHS = {"prompt_tokens": 100, "response_tokens": 50}
NOTHING = {**NUMBERS, **dict.fromkeys(("gpu", "rates", *LENGTHS))}


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of eight GPUs."""
    node = {"num_cpus": 4, "num_gpus": 8}
    with ray_nodes(node, address=own_address(), head=node) as made:
        yield made.cluster


def options_of(**given):
    return argparse.Namespace(**(NOTHING | {"config": str(GRPO), "overrides": absolute(), "resume": False} | given))


def layout_of(found, *overrides, **given):
    return make_layout(load_config(GRPO, absolute(*overrides)), options_of(**given), found)


def printed(actor, words):
    """What a command prints, once it has ended with 0."""
    import ray

    ray.get(actor.start.remote(words, {}, "."))
    lines = []
    while True:
        report = ray.get(actor.report.remote())
        lines += report.lines
        if report.code is not None:
            assert report.code == 0, lines
            return lines
        time.sleep(0.1)


@pytest.mark.wide
@pytest.mark.scenario(
    "launchers/two-nodes-of-eight-gpus", clauses=["launchers/a-cluster-s-gpus-are-divided-as-planned#2,3"]
)
def test_every_part_has_gpus_of_its_own_on_one_node_and_ranks_know_their_place(cluster):
    import ray

    from rollmatch.launch.ray_cluster import connected, find_gpus, place, reserved

    layout = Layout(num_learner_nodes=2, ranks_per_node=6, servers=(2, 2))
    alone = absolute("custom.extra.rollout_server.vllm_data_parallel_size=null")
    options = options_of(config=str(MATCHING), overrides=alone, overwrite=False)
    words = RunWords(config=load_config(MATCHING, alone), options=options, layout=layout)
    needs = needs_of(layout)
    with connected(cluster.address, min_cpus=1):
        assert find_gpus() == ClusterGpus(nodes=(8, 8))
        with reserved(needs) as group:
            actors = [place(group, index) for index in range(len(needs))]
            sites = ray.get([actor.site.remote() for actor in actors])
            words.settle([site.host for site in sites[2:]])
            endpoint = f"{sites[0].host}:{sites[0].port}"
            trained = [
                printed(actor, [*words.learner(site.gpus, resume=False, node=rank, endpoint=endpoint), "--dry-run"])
                for rank, (actor, site) in enumerate(zip(actors[:2], sites, strict=False))
            ]
    used = [(site.node, gpu) for site in sites for gpu in site.gpus]
    assert sorted(used) == sorted({(site.node, str(gpu)) for site in sites for gpu in range(8)})
    assert [len(site.gpus) for site in sites] == [6, 6, 2, 2]
    assert sites[0].node != sites[1].node
    for rank, (line, site) in enumerate(zip(trained, sites, strict=False)):
        assert f"CUDA_VISIBLE_DEVICES={','.join(site.gpus)} " in line[-1]
        torchrun = f"--nnodes 2 --node-rank {rank} --rdzv-endpoint {endpoint} --nproc-per-node 6 --no-python "
        assert torchrun in line[-1]
    for index, site in enumerate(sites[2:]):
        assert words.server(index, site.gpus)[-4:] == ["--server", str(index), "--gpus", ",".join(site.gpus)]


@pytest.mark.scenario(clauses=["launchers/a-cluster-s-gpus-are-divided-as-planned#1"])
@pytest.mark.parametrize("tp", [1, 4])
def test_the_split_is_the_one_of_plan(capsys, tp):
    size = f"custom.extra.rollout_server.vllm_tensor_parallel_size={tp}"
    sets = [part for override in absolute(size) for part in ("--set", override)]
    where = ["--gpus", "8", "--nodes", "2", "--gpu", "H100"]
    assert main(["plan", str(GRPO), *where, "--prompt-tokens", "100", "--response-tokens", "50", "--json", *sets]) == 0
    plan = json.loads(capsys.readouterr().out)
    [best] = [one for one in plan["forecasts"] if one["name"] == plan["best"]]
    layout = layout_of(ClusterGpus(nodes=(8, 8), model="H100"), size, **LENGTHS)
    assert (layout.num_learner_nodes, layout.ranks_per_node, list(layout.servers)) == tuple(best["layout"].values())
    assert f"plan of {plan['best']}, " in capsys.readouterr().out
    assert all(gpus % tp == 0 for gpus in layout.servers)


@pytest.mark.wide
@pytest.mark.scenario(clauses=["launchers/a-cluster-s-gpus-are-divided-as-planned#1"])
def test_the_commands_of_a_plan_are_printed_for_a_running_cluster(capsys, cluster):
    sets = [part for override in absolute() for part in ("--set", override)]
    assert main(["up", str(GRPO), "--address", cluster.address, "--gpu", "H200", "--dry-run", *sets]) == 0
    plan, *commands = capsys.readouterr().out.splitlines()
    assert plan.startswith("rollmatch up: plan of ")
    gpus = [len(command.split("--gpus ")[1].split()[0].split(",")) for command in commands]
    assert sum(gpus) == 16


def test_numbers_that_are_named_are_kept():
    two, one = ClusterGpus(nodes=(8, 8)), ClusterGpus(nodes=(4, 2, 2))
    assert layout_of(two, servers=2) == Layout(num_learner_nodes=1, ranks_per_node=1, servers=(1, 1))
    assert layout_of(two, learners=12) == Layout(num_learner_nodes=2, ranks_per_node=6, servers=(1,))
    assert layout_of(two, learners=16) == Layout(num_learner_nodes=2, ranks_per_node=8, servers=(1,))
    assert layout_of(one, learners=6) == Layout(num_learner_nodes=3, ranks_per_node=2, servers=(1,))
    assert layout_of(ClusterGpus(), learner_nodes=2) == Layout(num_learner_nodes=2, ranks_per_node=1, servers=(1,))
    too_many = Layout(num_learner_nodes=1, ranks_per_node=10, servers=(1,))
    assert layout_of(ClusterGpus(nodes=(4,)), learners=10) == too_many, "what is too small is found by what is reserved"
    eight = layout_of(two, "custom.extra.rollout_server.vllm_data_parallel_size=4", learners=2)
    assert eight == Layout(num_learner_nodes=1, ranks_per_node=2, servers=(4,))
    with refused("out-of-range", "--learner-nodes"):
        layout_of(two, learners=3, learner_nodes=2)


@pytest.mark.scenario(clauses=["launchers/a-cluster-s-gpus-are-divided-as-planned#5,6"])
def test_what_a_plan_would_need_or_nothing_would_use_is_refused():
    with refused("forecast-not-used", "--gpu"):
        layout_of(ClusterGpus(nodes=(8,)), gpu="H200", servers=1)
    with refused("forecast-not-used", "--prompt-tokens"):
        layout_of(ClusterGpus(), prompt_tokens=100)
    with refused("gpu-model-unknown", "--gpu"):
        layout_of(ClusterGpus(nodes=(8,)))
    with refused("gpu-model-unknown", "--gpu", problem="no rates of A100", remedy="H100, H200"):
        layout_of(ClusterGpus(nodes=(8,), model="A100"))
    with refused("too-few-gpus", "--address"):
        layout_of(ClusterGpus(nodes=(1,), model="H200"))
