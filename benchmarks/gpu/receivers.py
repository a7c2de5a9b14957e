"""Weights of an 8B-shaped model to one server and to all, ten times each and to one again, over HTTP as a run does it.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.receivers --results benchmarks/results

The last GPU is the learner's, each other one a server's. What one receiver costs is the median of both its turns, so
that a machine that grows slower or faster favours neither. What sets up a group, its first sync too, is no sample.

``--buckets-mb 64 256 1024 4096`` does it with buckets of these sizes, one group of NCCL calls each, in one run.
``--tiny`` rehearses it on a CPU, with two servers.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file

from benchmarks.gpu.eight_billion import NUM_LAYERS, ROOT, make_directory, random_weights
from benchmarks.gpu.report import Report, folder_of, parser_of
from benchmarks.gpu.ways import PHASES, OurServers

BAR = 1.05
ROUNDS = 10
TINY_MODEL = ROOT / "fixtures/models/arithmetic"
TINY = {"enforce_eager": True, "kv_cache_memory_bytes": 32 << 20}
USUAL = 0
"""Bytes of a bucket: as a run has them."""


def measure(num_layers=NUM_LAYERS, rounds=ROUNDS, *, sizes=(USUAL,), tiny=False, keep=None):
    """Samples in seconds of either, and the ratio of their medians; of the first size, and of each by itself.

    ``keep`` receives each size as soon as it is measured.
    """
    by_size = {}
    num_servers = 2 if tiny else torch.cuda.device_count() - 1
    with tempfile.TemporaryDirectory() as folder:
        directory = TINY_MODEL if tiny else Path(folder) / "model"
        if not tiny:
            make_directory(directory, num_layers)
        small = (TINY,) if tiny else ()
        servers = OurServers(directory, num_servers, Path(folder), *small, **({"max_model_len": 64} if tiny else {}))
        try:
            weights = load_file(TINY_MODEL / "model.safetensors") if tiny else random_weights(learner_gpu(), num_layers)
            for size in sizes:
                by_size[size] = measure_one(servers, weights, rounds, size)
                if keep is not None:
                    keep(by_bucket_bytes=by_size)
        finally:
            servers.end()
    figures = {
        "num_servers": num_servers,
        "num_bytes": sum(tensor.nbytes for tensor in weights.values()),
        "bar": BAR,
    }
    return figures | by_size[sizes[0]]


def learner_gpu():
    """The last one, and from now on this thread's."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    return device


def measure_one(servers, weights, rounds, bucket_bytes):
    samples, phases = {"one": [], "all": []}, {"one": [], "all": []}
    for name, places in (("one", [0]), ("all", range(len(servers.instances))), ("one", [0])):
        servers.connect(weights, places, bucket_bytes=bucket_bytes)
        samples[name] += take(servers, rounds)
        phases[name] += servers.phases_s
        servers.sender.close()
    one, all_ = (statistics.median(samples[name]) for name in samples)
    medians = {
        name: {phase: statistics.median(one[phase] for one in figures) for phase in PHASES}
        for name, figures in phases.items()
    }
    return {"samples_s": samples, "phases_s": medians, "all / one": all_ / one}


def take(servers, rounds):
    """Seconds of each sync."""
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        servers()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - began)
    return samples


def main():
    options = parse()
    sizes = (USUAL, *(size << 20 for size in options.buckets_mb))
    name = "tiny" if options.tiny else torch.cuda.device_count() - 1
    report = Report(folder_of(options.results, is_rehearsal=options.tiny) / f"receivers_{name}.json")
    report.write(**measure(rounds=options.rounds, sizes=sizes, tiny=options.tiny, keep=report.write))
    for size, one in report.written["by_bucket_bytes"].items():
        report.say(f"buckets of {size >> 20 or 'usual'} MiB: all / one {one['all / one']:.3f} (bar {BAR})")
        for name, phases in one["phases_s"].items():
            spelled = ", ".join(f"{phase} {seconds * 1e3:.2f}" for phase, seconds in phases.items())
            report.say(f"  {name}: {statistics.median(one['samples_s'][name]) * 1e3:.2f} ms: {spelled}")
    report.end()


def parse():
    parser = parser_of(__doc__)
    parser.add_argument("--buckets-mb", type=int, nargs="+", default=[], help="besides the usual size, in MiB")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see that it runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
