"""Weights of an 8B-shaped model from one GPU to all others: the link's floor, ours, and vLLM's ways, in one run.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.sync_direct --results benchmarks/results

Every round takes one sample of each way, so that all see the same machine. The last GPU is the learner's; each other
one holds an engine without HTTP and one of our servers. Samples are seconds, kept as they are.
"""

import os
import tempfile
import threading
from functools import partial
from pathlib import Path

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.gpu.eight_billion import make_directory, random_weights
from benchmarks.gpu.peer_engine import Engines
from benchmarks.gpu.report import Report, parser_of
from benchmarks.gpu.ways import ENGINE, PACKED, Adapters, Direct, Floor, OneByOne, OurServers, Packed
from conformance.doubles.instance import free_port

BARS = {
    "direct / floor": 1.1,
    "server / floor": 1.1,
    "packed / direct": 1.8,
    "one by one / direct": 15,
    "server / server adapter": 1,
}
"""Times of the first over times of the second; the first two at most, the others at least."""


def main():
    options = parse()
    num_engines = torch.cuda.device_count() - 1
    device = torch.device("cuda", num_engines)
    torch.cuda.set_device(device)
    report = Report(options.results / f"sync_direct_1to{num_engines}.json", bars=BARS)
    give_up_after(options.limit_s, report)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        make_directory(directory, options.layers)
        engines = Engines(str(directory), num_engines, ENGINE | PACKED) if "engines" in options.parts else None
        servers = OurServers(directory, num_engines, Path(folder)) if "servers" in options.parts else None
        try:
            weights = random_weights(device, options.layers)
            num_bytes = sum(tensor.nbytes for tensor in weights.values())
            report.note(num_bytes=num_bytes, num_tensors=len(weights), num_receivers=num_engines)
            measure(report, weights, engines, servers, options)
        finally:
            for started in filter(None, (engines, servers)):
                started.end()
    report.end()


def measure(report, weights, engines, servers, options):
    """All ways that were asked for, in turn."""
    ways = {}
    if engines is not None:
        report.note(engines=str(engines.answers(within_s=150)))
        direct = Direct(engines, weights, port=free_port())
        ways["floor"] = Floor(direct, sum(tensor.nbytes for tensor in weights.values()))
        ways["direct"] = direct
    if servers is not None:
        attempt(report, "servers: connect", partial(servers.connect, weights))
        ways["server"] = servers
    for _ in range(options.rounds + 1):
        for name, way in ways.items():
            attempt(report, name, way)
        if "packed" not in ways and engines is not None:
            attempt(report, "packed: join", partial(join_packed, ways, engines, weights))
    for name in ways:
        report.samples.get(name, [None]).pop(0)  # the first of each sets things up
    if engines is not None:
        report.note(total_is_right=direct.total_is_right(), phases_of_direct_s=direct.phases_s[1:])
        one_by_one = OneByOne(direct)
        for _ in range(2):
            attempt(report, "one by one", one_by_one)
        ways["floor"].forget()
    if servers is not None:
        attempt(report, "adapters", partial(measure_adapters, report, servers, options))


def join_packed(ways, engines, weights):
    ways["packed"] = Packed(engines, weights, port=free_port())


def measure_adapters(report, servers, options):
    """The first one reads the base from its file; what the learner does beside the servers is also measured alone."""
    adapters = Adapters(servers, options.layers)
    attempt(report, "server adapter: first", adapters)
    report.note(phases_of_server_s=servers.phases_s[1:])
    servers.phases_s = []
    for _ in range(options.rounds):
        attempt(report, "server adapter", adapters)
        attempt(report, "learner's merge and its digests", adapters.prove)
    report.note(phases_of_adapter_s=servers.phases_s)
    report.note(adapter_bytes=adapters.num_bytes)


def attempt(report, name, call):
    """A way that fails is reported, and the others continue."""
    try:
        report.sample(name, call)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ways are worth their time
        report.note(**{f"{name} failed": f"{type(error).__name__}: {error}"[:1500]})


def give_up_after(limit_s, report):
    def leave():
        report.say("out of time")
        os._exit(3)

    timer = threading.Timer(limit_s, leave)
    timer.daemon = True
    timer.start()


def parse():
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=235.0)
    parser.add_argument("--parts", nargs="+", default=["engines", "servers"], choices=["engines", "servers"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
