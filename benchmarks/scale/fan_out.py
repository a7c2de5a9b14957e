"""A sync's bytes on their way to many servers: every bucket over every link, one after the other as the links are free.

Each machine has one link, which sends and receives at the same time. A bucket is passed on when it has arrived whole.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

LEARNER = 0
Edge = tuple[int, int]
"""Sender and receiver; servers are numbered from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a sync travels over."""

    link_bytes_s: float
    hop_s: float
    """From the end of sending to the begin of passing on."""
    bucket_bytes: int
    num_in_flight: int
    """Buckets that the learner has begun and not ended to send."""


def chain(num_servers: int) -> Iterator[Edge]:
    """NCCL's ring and ours over gloo: each server passes a slice on to the next."""
    yield from ((server - 1, server) for server in range(1, num_servers + 1))


def binomial_tree(num_servers: int) -> Iterator[Edge]:
    """gloo's broadcast: in round i, each of the first 2^i members sends the whole bucket to one that lacks it.

    >>> list(binomial_tree(4))
    [(0, 1), (0, 2), (1, 3), (0, 4)]
    """
    reach = 1
    while reach <= num_servers:
        yield from ((member, member + reach) for member in range(reach) if member + reach <= num_servers)
        reach *= 2


def unicast(num_servers: int) -> Iterator[Edge]:
    """A group for each server: the learner sends everything to each."""
    yield from ((LEARNER, server) for server in range(1, num_servers + 1))


WAYS: dict[str, Callable[[int], Iterator[Edge]]] = {"chain": chain, "binomial tree": binomial_tree, "unicast": unicast}


def sync_s(way: str, num_servers: int, *, num_bytes: float, network: Network) -> float:
    """Seconds until the last server has the last bucket.

    >>> slow = Network(link_bytes_s=1.0, hop_s=0.0, bucket_bytes=1, num_in_flight=9)
    >>> [sync_s(way, 4, num_bytes=10, network=slow) for way in WAYS]
    [13.0, 30.0, 40.0]
    """
    edges = list(WAYS[way](num_servers))
    sending, receiving = [0.0] * (num_servers + 1), [0.0] * (num_servers + 1)
    carry_s, ended = network.bucket_bytes / network.link_bytes_s, list[float]()
    last = 0.0
    for bucket in range(-(-int(num_bytes) // network.bucket_bytes)):
        begin = ended[bucket - network.num_in_flight] if bucket >= network.num_in_flight else 0.0
        here = [begin] + [0.0] * num_servers
        for sender, receiver in edges:
            end = max(here[sender], sending[sender], receiving[receiver]) + carry_s
            sending[sender] = receiving[receiver] = end
            here[receiver] = end + network.hop_s
            last = max(last, here[receiver])
        ended.append(sending[LEARNER])
    return last
