"""How many servers and learner ranks ``rollmatch up`` starts: as typed, or as ``rollmatch plan`` proposes."""

import argparse
from dataclasses import dataclass

from rollmatch.config import RunConfig
from rollmatch.config.servers import pair_servers, server_section
from rollmatch.errors import LaunchError
from rollmatch.plan.forecast import Site, make_forecaster
from rollmatch.plan.layout import Layout, lay_out
from rollmatch.plan.proposal import propose
from rollmatch.plan.rates import load_rates
from rollmatch.plan.workload import Split

TYPED = ("servers", "learners", "learner_nodes")
FORECAST = ("gpu", "rates", "prompt_tokens", "response_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterGpus:
    """GPUs of a cluster."""

    nodes: tuple[int, ...] = ()
    """Of each node that has any."""
    model: str | None = None
    """Where all are of one that the cluster knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one command of a run reserves, on one node."""

    name: str
    gpus: int
    """On a cluster without GPUs: processes, each of which computes on the CPU."""


def is_typed(options: argparse.Namespace) -> bool:
    """Whether the user names the numbers."""
    return any(getattr(options, name) is not None for name in TYPED)


def make_layout(config: RunConfig, options: argparse.Namespace, found: ClusterGpus) -> Layout:
    """The layout for a cluster; where it has no GPUs, each process computes on the CPU.

    Errors: ``out-of-range``, ``forecast-not-used``, ``gpu-model-unknown``, those of ``propose``.
    """
    if found.nodes and not is_typed(options):
        return _planned(config, options, found)
    given = [name for name in FORECAST if getattr(options, name) is not None]
    if given:
        problem = "is set, and nothing is planned: " + ("the numbers are named" if found.nodes else "there is no GPU")
        remedy = "Leave it out, or leave --servers, --learners and --learner-nodes out on a cluster with GPUs."
        raise LaunchError(problem, code="forecast-not-used", key=f"--{given[0].replace('_', '-')}", remedy=remedy)
    return _typed(config, options, found)


def needs_of(layout: Layout) -> list[Need]:
    """One command per node of the learner, then one per server."""
    count = layout.num_learner_nodes
    names = ["learner"] if count == 1 else [f"learner-{rank}" for rank in range(count)]
    learners = [Need(name=name, gpus=layout.ranks_per_node) for name in names]
    return learners + [Need(name=f"server-{index}", gpus=size) for index, size in enumerate(layout.servers)]


def _typed(config: RunConfig, options: argparse.Namespace, found: ClusterGpus) -> Layout:
    section = config.custom.extra.rollout_server
    size = section.vllm_tensor_parallel_size * (section.vllm_data_parallel_size or 1)
    num_ranks = options.learners or options.learner_nodes or 1
    alone = lay_out(Split(num_serving=0, num_learning=num_ranks), found.nodes)
    num_nodes = options.learner_nodes or (alone.num_learner_nodes if alone else 1)
    if num_ranks % num_nodes:
        problem = f"{num_ranks} learner ranks do not divide over {num_nodes} nodes"
        remedy = "Name a divisor of --learners: every node has as many ranks."
        raise LaunchError(problem, code="out-of-range", key="--learner-nodes", remedy=remedy)
    num_servers = options.servers or len(pair_servers(server_section(config)))
    ranks_per_node = num_ranks // num_nodes
    return Layout(num_learner_nodes=num_nodes, ranks_per_node=ranks_per_node, servers=(size,) * num_servers)


def _planned(config: RunConfig, options: argparse.Namespace, found: ClusterGpus) -> Layout:
    gpu, known = options.gpu or found.model, load_rates(options.rates).gpus
    if gpu not in known:
        what = f"there are no rates of {gpu}" if gpu else "the cluster does not name one model for all of its GPUs"
        remedy = f"Name one of {', '.join(known)}, bring others in --rates, or set --servers and --learners."
        raise LaunchError(f"the split cannot be planned: {what}", code="gpu-model-unknown", key="--gpu", remedy=remedy)
    each = config.custom.extra.rollout_server.vllm_data_parallel_size
    site = Site(gpu=gpu, nodes=found.nodes, engines_per_server=each)
    forecaster = make_forecaster(
        config,
        site,
        rates_file=options.rates,
        prompt_tokens=options.prompt_tokens,
        response_tokens=options.response_tokens,
    )
    best = propose(forecaster, key="--address").best
    assert best.layout is not None, "a proposal without a layout"
    print(f"rollmatch up: plan of {best.split}, {best.rollouts_per_s:.2f} rollouts/s: {best.layout}", flush=True)
    return best.layout
