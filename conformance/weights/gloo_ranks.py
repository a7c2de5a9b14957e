"""Processes that meet in a real gloo group; run as a script, one of its receivers: ``gloo_ranks.py RANK SIZE PORT``."""

import json
import sys

from conformance.processes import start
from rollmatch.weights.digest import bytes_of, cut, digests_of
from rollmatch.weights.gloo import Buffer, GlooGroup
from rollmatch.weights.group_address import GroupAddress

SECRET = "between these ranks only"


def address_of(rank, world_size, port):
    return GroupAddress(
        host="127.0.0.1",
        port=port,
        rank=rank,
        world_size=world_size,
        secret=SECRET,
        timeout_s=20.0,
        join_timeout_s=40.0,
    )  # fmt: skip


def broadcast_between(world_size, buckets, *, port, folder):
    """Send lists of tensors, each list a bucket, from this process to the others; returns the digests each holds."""
    shapes = [[(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in bucket] for bucket in buckets]
    receivers = [
        start(
            [sys.executable, __file__, str(rank), str(world_size), str(port), json.dumps(shapes)],
            folder / f"rank{rank}",
        )
        for rank in range(world_size - 1)
    ]
    try:
        group, buffer = GlooGroup.open(address_of(world_size - 1, world_size, port)), Buffer()
        for bucket in buckets:
            group.broadcast(buffer.fill(list(map(bytes_of, bucket))), source=world_size - 1)
        assert [process.wait(timeout=40) for process in receivers] == [0] * len(receivers)
        held = [json.loads((folder / f"rank{rank}").read_text()) for rank in range(world_size - 1)]
        group.close()
        return held
    finally:
        for process in receivers:
            process.kill()
            process.wait()


def receive(rank, world_size, port, shapes):
    import torch

    group, held = GlooGroup.open(address_of(rank, world_size, port)), []
    for bucket in shapes:
        kinds = [(getattr(torch, dtype), tuple(shape)) for dtype, shape in bucket]
        flat = torch.empty(sum(d.itemsize * torch.Size(s).numel() for d, s in kinds), dtype=torch.uint8)
        group.broadcast(flat, source=world_size - 1)
        held += digests_of(cut(flat, kinds))
    sys.stdout.write(json.dumps(held))


if __name__ == "__main__":
    receive(*map(int, sys.argv[1:4]), json.loads(sys.argv[4]))
