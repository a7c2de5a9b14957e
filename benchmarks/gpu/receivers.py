"""Weights of an 8B-shaped model to one server and to all, ten times each and to one again, over HTTP as a run does it.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.receivers --results benchmarks/results

The last GPU is the learner's, each other one a server's. What one receiver costs is the median of both its turns, so
that a machine that grows slower or faster favours neither. The first sync to each group sets things up and is dropped.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.gpu.eight_billion import NUM_LAYERS, make_directory, random_weights
from benchmarks.gpu.machine import describe
from benchmarks.gpu.ways import OurServers

BAR = 1.05
ROUNDS = 10


def measure(num_layers=NUM_LAYERS, rounds=ROUNDS):
    """Samples in seconds of either, and the ratio of their medians."""
    num_servers = torch.cuda.device_count() - 1
    device = torch.device("cuda", num_servers)
    torch.cuda.set_device(device)
    samples = {"one": [], "all": []}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        make_directory(directory, num_layers)
        servers = OurServers(directory, num_servers, Path(folder))
        try:
            weights = random_weights(device, num_layers)
            for name, places in (("one", [0]), ("all", range(num_servers)), ("one", [0])):
                servers.connect(weights, places)
                samples[name] += take(servers, rounds)
                servers.sender.close()
        finally:
            servers.end()
    one, all_ = (statistics.median(samples[name]) for name in samples)
    told = {
        "machine": describe(),
        "num_servers": num_servers,
        "num_bytes": sum(tensor.nbytes for tensor in weights.values()),
    }
    return told | {"samples_s": samples, "all / one": all_ / one, "bar": BAR}


def take(servers, rounds):
    """Seconds of each sync but the first."""
    samples = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        servers()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - began)
    return samples[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    told = measure()
    path = options.results / f"receivers_{told['num_servers']}.json"
    path.write_text(json.dumps(told, indent=1) + "\n")
    sys.stdout.write(f"to all {told['num_servers']} / to one: {told['all / one']:.3f} (bar {BAR}), {path}\n")


if __name__ == "__main__":
    main()
