"""A split on the nodes of a cluster: on which node each server's engines and each learner rank are."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollmatch.plan.workload import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Commands of a run, each on one node."""

    num_learner_nodes: int
    ranks_per_node: int
    """Learner ranks of each of these nodes."""
    servers: tuple[int, ...]
    """GPUs of each rollout server; none where engines are in learners' processes."""

    @property
    def num_learning(self) -> int:
        """Learner ranks on all nodes."""
        return self.num_learner_nodes * self.ranks_per_node

    def __str__(self) -> str:
        where = f"{self.ranks_per_node} on each of {self.num_learner_nodes} nodes"
        ranks = f"{self.num_learning} learner ranks" + (f", {where}" if self.num_learner_nodes > 1 else "")
        return ranks + (f"; servers of {', '.join(map(str, self.servers))} GPUs" if self.servers else "")


def lay_out(split: Split, nodes: Sequence[int], *, engines_per_server: int | None = None) -> Layout | None:
    """Put a split on nodes with so many GPUs each; None where it does not go.

    Learner ranks are on as few nodes as possible, as many on each, because torchrun is started alike on all of them.
    ``engines_per_server``: by default one server per node holds all engines there.

    >>> print(lay_out(Split(num_serving=10, num_learning=6, tp=2), (8, 8)))
    6 learner ranks; servers of 8, 2 GPUs
    >>> print(lay_out(Split(num_serving=4, num_learning=12), (8, 8), engines_per_server=2))
    12 learner ranks, 6 on each of 2 nodes; servers of 2, 2 GPUs
    >>> lay_out(Split(num_serving=5, num_learning=11), (8, 8)) is None
    True
    """
    largest_first = sorted(nodes, reverse=True)
    for num_nodes, smallest in enumerate(largest_first, 1):
        each, rest = divmod(split.num_learning, num_nodes)
        if rest or each > smallest or (split.is_colocated and each % split.tp):
            continue
        left = [size - each for size in largest_first[:num_nodes]] + largest_first[num_nodes:]
        servers = () if split.is_colocated else _servers(split, left, engines_per_server)
        if servers is not None:
            return Layout(num_learner_nodes=num_nodes, ranks_per_node=each, servers=servers)
    return None


def _servers(split: Split, left: Sequence[int], engines_per_server: int | None) -> tuple[int, ...] | None:
    """GPUs of each server, on the nodes where most GPUs are left first."""
    sizes, missing = list[int](), split.num_engines
    for room in sorted((gpus // split.tp for gpus in left), reverse=True):
        each = engines_per_server or min(room, missing)
        while each and each <= min(room, missing):
            sizes.append(each * split.tp)
            room, missing = room - each, missing - each
    return None if missing else tuple(sizes)
