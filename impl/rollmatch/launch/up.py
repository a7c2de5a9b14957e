"""``rollmatch up``: rollout servers and learner of a YAML on a Ray cluster, by the commands that people type."""

import argparse
import importlib.util
import os

from rollmatch.config import RunConfig, load_config
from rollmatch.config.servers import (
    server_key,
    server_section,
    uses_servers,
)
from rollmatch.errors import LaunchError
from rollmatch.launch.layout import ClusterGpus, is_typed, make_layout, needs_of
from rollmatch.launch.processes import shell_line
from rollmatch.launch.run_commands import RunWords
from rollmatch.run.machine import has_gpu

RAY_BEYOND_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch, on Linux, too: a cluster of one machine listens at loopback, so that no firewall asks."""


def up(options: argparse.Namespace) -> int:
    """Run to the learner's end; returns its exit code.

    Errors: those of the configuration and of ``make_layout``, ``server-not-used``, ``servers-file-not-used``,
    ``out-of-range``, ``ray-missing``, ``cluster-unreachable``, ``cluster-too-small``, ``command-not-started``,
    ``server-moved``, ``lost-too-often``.
    """
    config = load_config(options.config, options.overrides)
    _check_mode(config)
    is_elsewhere = bool(options.address or os.environ.get("RAY_ADDRESS"))
    is_planned = not is_typed(options) and (is_elsewhere or has_gpu())
    if options.dry_run and not is_planned:
        _show(RunWords(config=config, options=options, layout=make_layout(config, options, ClusterGpus())))
        return 0
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("ray is not installed", code="ray-missing", remedy="Install it: pip install 'ray>=2.50'.")
    if not is_elsewhere:
        os.environ.setdefault(RAY_BEYOND_LOOPBACK, "0")  # read when Ray is imported
    from rollmatch.launch.ray_cluster import connected, find_gpus, reserved
    from rollmatch.launch.ray_run import RayRun

    num_commands = 1 if is_planned else len(needs_of(make_layout(config, options, ClusterGpus())))
    with connected(options.address, min_cpus=num_commands):
        words = RunWords(config=config, options=options, layout=make_layout(config, options, find_gpus()))
        if options.dry_run:
            _show(words)
            return 0
        needs = needs_of(words.layout)
        with reserved(needs) as group:
            return RayRun(words, group, needs, max_restarts=options.max_restarts).run()


def _show(words: "RunWords") -> None:
    """The commands, with names in place of the addresses that a cluster gives."""
    words.settle([f"node{index}" for index in range(len(words.layout.servers))])
    servers = [words.server(index, ()) for index in range(len(words.layout.servers))]
    nodes = range(words.layout.num_learner_nodes)
    learners = [words.learner((), resume=False, node=node, endpoint="learner-0:PORT") for node in nodes]
    for command in (*servers, *learners):
        print(shell_line(["rollmatch", *command], {}))


def _check_mode(config: RunConfig) -> None:
    if not uses_servers(config):
        key = "custom.extra.rollout_matching.vllm.mode"
        problem, remedy = "no rollout server is used", "Set mode: server; rollmatch train runs everything else."
        raise LaunchError(problem, code="server-not-used", key=key, remedy=remedy)
    if server_section(config).servers_file is not None:
        problem = "is set: it says where servers are, and servers of rollmatch up are where Ray places them"
        remedy = "Set it to null and name base_url and group_port; their ports are used, and --servers says how many."
        raise LaunchError(
            problem, code="servers-file-not-used", key=f"{server_key(config)}.servers_file", remedy=remedy
        )
