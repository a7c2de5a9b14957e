"""Broadcasts to another process, bare and in buckets; run as a script, the other end: KIND, PORT, SIZES.

The other end answers with a broadcast of one byte, so that the sender knows when all has arrived.
"""

import json
import socket
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist

from rollmatch.weights.digest import Buffer, bytes_of
from rollmatch.weights.gloo import MAX_IN_FLIGHT, GlooGroup, InFlight
from rollmatch.weights.group_address import GroupAddress

ROOT = Path(__file__).parents[2]
SENDER, RECEIVER, TIMEOUT_S = 1, 0, 60.0
SECRET = "of the benchmark's group"


def bytes_like(size):
    """Touched memory, because memory that was never written to is not there yet."""
    return torch.ones(size, dtype=torch.uint8)


@contextmanager
def other_end(kind, sizes):
    """The port of a process that receives broadcasts of so many bytes, again and again."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.sync.gloo_peers", kind, str(port), json.dumps(sizes)]
    receiver = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        receiver.kill()
        receiver.wait()


def join_bare(port, rank):
    """Torch's default group."""
    where, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=limit)


def join_ours(port, rank):
    address = GroupAddress(
        host="127.0.0.1",
        port=port,
        rank=rank,
        world_size=2,
        secret=SECRET,
        timeout_s=TIMEOUT_S,
        join_timeout_s=TIMEOUT_S,
    )
    return GlooGroup.open(address)


@contextmanager
def bare_broadcast(size):
    """A call that sends one tensor of so many bytes."""
    tensor, answer = bytes_like(size), bytes_like(1)
    with other_end("bare", [size]) as port:
        join_bare(port, SENDER)

        def send():
            dist.broadcast(tensor, src=SENDER)
            dist.broadcast(answer, src=RECEIVER)

        yield send
    dist.destroy_process_group()


@contextmanager
def bucketed_broadcast(buckets):
    """A call that sends lists of tensors, each list a bucket, as a sync does."""
    buffers, answer = [Buffer() for _ in range(MAX_IN_FLIGHT + 1)], bytes_like(1)
    with other_end("bucketed", [sum(tensor.nbytes for tensor in bucket) for bucket in buckets]) as port:
        group = join_ours(port, SENDER)

        def send():
            in_flight = InFlight(group.begin)
            for bucket, buffer in zip(buckets, cycle(buffers), strict=False):
                in_flight.add(buffer.fill(list(map(bytes_of, bucket))))
            in_flight.wait()
            group.broadcast(answer, source=RECEIVER)

        yield send
        group.close()


def receive_bare(port, sizes):
    """Into the same memory every time."""
    join_bare(port, RECEIVER)
    memory, answer = bytes_like(sum(sizes)), bytes_like(1)
    while True:
        dist.broadcast(memory, src=SENDER)
        dist.broadcast(answer, src=RECEIVER)


def receive_buckets(port, sizes):
    """As a worker does: into memory that is used again by the next sync."""
    group, answer = join_ours(port, RECEIVER), bytes_like(1)
    blocks = [bytes_like(size) for size in sizes]
    while True:
        in_flight = InFlight(group.begin)
        for block in blocks:
            in_flight.add(block)
        in_flight.wait()
        group.broadcast(answer, source=RECEIVER)


if __name__ == "__main__":
    kind, port, sizes = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    {"bare": receive_bare, "bucketed": receive_buckets}[kind](port, sizes)
