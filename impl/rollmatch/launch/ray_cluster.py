"""Nodes and GPUs of a Ray cluster for the commands of one run."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollmatch.errors import LaunchError
from rollmatch.launch.layout import ClusterGpus, Need
from rollmatch.launch.ray_command import CommandActor

PLACEMENT_S = 60.0
"""How long resources are waited for that a cluster has and somebody else uses."""


@contextmanager
def connected(address: str | None, *, min_cpus: int) -> Iterator[None]:
    """Ray: the cluster at an address or in ``RAY_ADDRESS``, else one of this machine alone that ends with us.

    ``min_cpus``: that Ray counts on this machine, however few there are; they are a reservation, not a speed.

    Errors: ``cluster-unreachable``.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
    named = address or os.environ.get("RAY_ADDRESS")
    try:
        if named:
            ray.init(address=named, logging_level=logging.ERROR, log_to_driver=False)
        else:
            ray.init(address="local", num_cpus=max(os.cpu_count() or 1, min_cpus), **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        problem, remedy = f"{named or 'local'}: {error}", "Name the head node's HOST:6379, as ray start prints it."
        raise LaunchError(problem, code="cluster-unreachable", key="--address", remedy=remedy) from error
    try:
        yield
    finally:
        ray.shutdown()


def find_gpus() -> ClusterGpus:
    """GPUs of all nodes; without any, commands compute on CPUs and reserve one each."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    models = {name.partition(":")[2] for node in nodes for name in node if name.startswith("accelerator_type:")}
    sizes = tuple(int(node["GPU"]) for node in nodes if node.get("GPU"))
    return ClusterGpus(nodes=sizes, model=models.pop() if len(models) == 1 else None)


@contextmanager
def reserved(needs: Sequence[Need]) -> Iterator[PlacementGroup]:
    """A bundle per command, as few nodes as possible. Errors: ``cluster-too-small``."""
    bundles = [_bundle(need) for need in needs]
    _check_size(needs, bundles)
    group = placement_group(bundles, strategy="PACK")
    try:
        if not group.wait(PLACEMENT_S):
            free = _amounts([ray.available_resources()])
            problem = f"{_shown(needs, bundles)}; for {PLACEMENT_S:g} s only {free} were free, on all nodes together"
            raise _too_small(problem, "End other jobs, or place fewer servers.")
        yield group
    finally:
        remove_placement_group(group)


def place(group: PlacementGroup, index: int) -> ActorHandle:
    """An actor in a bundle; if the bundle's node was lost, it waits until Ray finds another."""
    bundle = group.bundle_specs[index]
    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    options = {"num_cpus": 1, "num_gpus": int(bundle.get("GPU", 0)), "scheduling_strategy": where}
    return ray.remote(CommandActor).options(**options).remote()


def _bundle(need: Need) -> dict[str, float]:
    return {"CPU": 1, "GPU": need.gpus} if find_gpus().nodes else {"CPU": 1}


def _check_size(needs: Sequence[Need], bundles: Sequence[dict[str, float]]) -> None:
    """Find at once what no waiting helps against."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    remedy = "Add nodes, or place fewer servers or learner ranks."
    for kind in ("CPU", "GPU"):
        total = sum(node.get(kind, 0) for node in nodes)
        if total < sum(bundle.get(kind, 0) for bundle in bundles):
            raise _too_small(f"{_shown(needs, bundles)}; {len(nodes)} nodes have {_amounts(nodes)}", remedy)
    largest = max(node.get("GPU", 0) for node in nodes)
    for need, bundle in zip(needs, bundles):
        if bundle.get("GPU", 0) > largest:
            problem = f"{need.name} needs {need.gpus} GPUs of one node, the largest has {largest:g}"
            raise _too_small(problem, "Give it fewer ranks or replicas.")


def _shown(needs: Sequence[Need], bundles: Sequence[dict[str, float]]) -> str:
    return f"{needs[0].name} to {needs[-1].name} need {_amounts(bundles)}"


def _amounts(resources: Sequence[dict[str, float]]) -> str:
    sums = [(sum(one.get(kind, 0) for one in resources), kind) for kind in ("CPU", "GPU")]
    return " and ".join(f"{number:g} {kind}s" for number, kind in sums if number or kind == "CPU")


def _too_small(problem: str, remedy: str) -> LaunchError:
    return LaunchError(problem, code="cluster-too-small", key="--servers", remedy=remedy)
