"""A run that ``rollmatch up`` has started: its words, its processes, and the nodes that it loses."""

import re

import psutil

from conformance.doubles.division import MATCHING, SMALL, named
from conformance.doubles.instance import free_port
from conformance.doubles.killed_server import in_session
from conformance.doubles.started import cli_command

STARTED = r"^\[{0}\] rollmatch up: {0}.* is process (\d+) on node (\w+)$"
PARTS = ("learner", "learner-0", "learner-1", "server-0", "server-1")
"""Names that commands of the tests' runs have."""


def overrides_of(out, *more, steps, saved_at=2):
    """Port of the first server, and settings of a small run."""
    http = free_port()
    small = [override for override in SMALL if not override.startswith("training.save_steps")]
    return http, (
        *(*named(MATCHING, http, free_port()), *small),
        *(f"training.output_dir={out}", f"training.max_steps={steps}", f"training.save_steps={saved_at}"),
        "custom.extra.rollout_server.vllm_data_parallel_size=null",
        "custom.extra.rollout_matching.vllm.server.retry_budget_s=200",
        *more,
    )


def up(*overrides):
    """The command, in a process that is not forked: Ray reads the environment when it is imported."""
    return ["env", *cli_command("up", MATCHING, *overrides)]


def starts_of(running, name):
    """Process and node of each start of a part."""
    return re.findall(STARTED.format(name), running.output(), re.MULTILINE)


def now(running, name, num_starts):
    """Its process and node, once it was started for the nth time."""
    running.wait_until(lambda: len(starts_of(running, name)) >= num_starts)
    pid, node = starts_of(running, name)[-1]
    return psutil.Process(int(pid)), node


def left_of(running):
    """Processes that are left of a run's commands."""
    pids = [int(pid) for name in PARTS for pid, _ in starts_of(running, name)]
    return [process for pid in pids for process in in_session(pid)]


def lose(nodes, node):
    """A node, as if its power were cut; known by the beginning of its id."""
    lost = next(one for one in nodes.cluster.worker_nodes if one.node_id.startswith(node))
    nodes.cluster.remove_node(lost, allow_graceful=False)
