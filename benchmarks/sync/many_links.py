"""Weights to 4, 8 and 16 hosts with a link of 400 Mbit/s each: our chain beside gloo's own broadcast, in turn.

    python -m benchmarks.sync.many_links --results benchmarks/results

Every host is a network namespace on one bridge; ``tc`` (tbf) limits what it sends and what it receives. The members of
the group are threads of one process. Needs root and Linux.
"""

import os
import subprocess
import threading
from contextlib import ExitStack, contextmanager

import torch

from benchmarks.gpu.report import Report, parser_of
from conformance.doubles.hosts import enter
from rollmatch.weights.gloo import GlooGroup, broadcast_all
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.stateless import begin_on

RATE, NUM_BYTES, NUM_BUCKETS, TIMEOUT_S, FIRST_PORT = "400mbit", 2**28, 64, 120.0, 51400
NUMBERS = (4, 8, 16)
LIMIT = ("root", "tbf", "rate", RATE, "burst", "256kb", "latency", "50ms")
BARS = {f"chain, {number} servers / chain, 4 servers": 1.3 for number in NUMBERS[1:]}


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    report = Report(options.results / "many_links.json", bars=BARS)
    report.note(rate=RATE, num_bytes=NUM_BYTES, num_buckets=NUM_BUCKETS)
    with hosts(max(NUMBERS) + 1) as namespaces:
        for number in NUMBERS:
            with members(namespaces[: number + 1], FIRST_PORT + number) as groups:
                for _ in range(options.rounds + 1):
                    for way, call in {"chain": by_chain, "tree": by_tree}.items():
                        report.sample(f"{way}, {number} servers", lambda call=call: at_once(call, groups))
        for one in report.samples.values():
            one[:] = one[1:]  # connections and memory are new in the first round
    report.write()
    report.end()


def by_chain(group, tensors):
    broadcast_all(tensors, group.begin)


def by_tree(group, tensors):
    """As many in flight, in the same buckets."""
    broadcast_all(tensors, lambda one: begin_on(group._group, one, source=group.source, timeout_s=TIMEOUT_S).wait)


def at_once(call, groups):
    """All members, each in a thread of its own, until the last one has everything."""
    sides = [threading.Thread(target=call, args=pair) for pair in groups]
    for side in sides:
        side.start()
    for side in sides:
        side.join()


@contextmanager
def members(namespaces, port):
    """(group, its buckets) of each host; the last one sends."""
    joined = [None] * len(namespaces)

    def join(rank):
        enter(namespaces[rank])
        joined[rank] = GlooGroup.open(
            GroupAddress(
                host="10.79.0.1",
                port=port,
                rank=rank,
                world_size=len(namespaces),
                secret="s" * 32,
                timeout_s=TIMEOUT_S,
                join_timeout_s=TIMEOUT_S,
            )
        )

    at_once(join, [(rank,) for rank in range(len(namespaces))])
    buckets = [
        [torch.full((NUM_BYTES // NUM_BUCKETS,), rank, dtype=torch.uint8) for _ in range(NUM_BUCKETS)]
        for rank in range(len(namespaces))
    ]
    yield list(zip(joined, buckets, strict=True))
    for group in joined:
        group.close()
    assert {int(bucket.min()) for one in buckets for bucket in one} == {len(namespaces) - 1}, "not all has arrived"


@contextmanager
def hosts(number):
    """Names of so many network namespaces on a bridge, with addresses from 10.79.0.1 on."""
    names = [f"rollmatch-{os.getpid()}-{place}" for place in range(number)]
    switch = f"rollmatch-{os.getpid()}-switch"
    with ExitStack() as stack:
        for name in (switch, *names):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "delete", name)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for place, name in enumerate(names):
            port = f"port{place}"
            run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", name, "address", "add", f"10.79.0.{place + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *LIMIT)
            run("tc", "-n", switch, "qdisc", "add", "dev", port, *LIMIT)
        yield names


def run(*words):
    subprocess.run(words, check=True, capture_output=True)


if __name__ == "__main__":
    main()
