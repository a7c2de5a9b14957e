"""So many bytes from one process to all others and nothing else: what a sync is measured against.

    torchrun --nproc-per-node 7 -m benchmarks.gpu.bare_broadcast 16400000000

The last rank sends, as the learner does. Rank 0 prints the seconds of each round as JSON; the first is dropped.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

NUM_PIECES, ROUNDS = 16, 5


def main(num_bytes):
    on_gpu = torch.cuda.is_available()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    piece = torch.zeros(num_bytes // NUM_PIECES, dtype=torch.uint8, device=device)
    samples = [_round(piece, on_gpu=on_gpu) for _ in range(ROUNDS + 1)]
    if rank == 0:
        sys.stdout.write(json.dumps(samples[1:]) + "\n")
    dist.destroy_process_group()


def _round(piece, *, on_gpu):
    dist.barrier()
    began = time.perf_counter()
    for _ in range(NUM_PIECES):
        dist.broadcast(piece, src=dist.get_world_size() - 1)
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(int(sys.argv[1]))
