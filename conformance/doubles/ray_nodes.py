"""Ray's own cluster of several nodes on one machine."""

import socket
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from rollmatch.config.connection import is_loopback

HEALTH_CHECKS = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
"""By Ray's own numbers, 11 s pass before a lost node counts as dead. A slow node still has 10 s for each reply."""
AS_OTHERS = {"worker_niceness": 0}
"""By Ray's own number, its commands get what all other processes leave: next to nothing on a busy machine."""

NO_ROOM = {"num_cpus": 0, "num_gpus": 0}


def own_address():
    """An IPv4 address of this machine that is not loopback."""
    interfaces = psutil.net_if_addrs().values()
    found = [one.address for held in interfaces for one in held if one.family == socket.AF_INET]
    others = [address for address in found if not is_loopback(address)]
    assert others, "learners on several nodes need a network interface beside loopback"
    return others[0]


@contextmanager
def ray_nodes(*resources, address, head=NO_ROOM):
    """A head, and a node at ``address`` for each of ``resources``; yields ways to change it.

    Where nodes are lost, the head needs to be without room for commands. GPUs are a number: nothing looks for the
    devices.
    """
    from ray.cluster_utils import Cluster  # a second; the tests that need none can do without

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # whether this user's home has a token is no matter
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # else it looks for a head at 127.0.0.1 elsewhere
        where = {"node_ip_address": address, "include_dashboard": False}
        unread = {"include_log_monitor": False, "no_monitor": True}  # logs for a driver's terminal; an autoscaler
        first = {"_system_config": HEALTH_CHECKS | AS_OTHERS, **head, **unread, **where}
        cluster = Cluster(initialize_head=True, head_node_args=first)
        try:
            for each in resources:
                cluster.add_node(**each, **where)
            yield SimpleNamespace(
                cluster=cluster, add=lambda **other: cluster.add_node(**(resources[0] | where | other))
            )
        finally:
            cluster.shutdown()
