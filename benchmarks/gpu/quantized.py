"""Decoding and syncs of an 8B shape: our server in bfloat16, and with weights that vLLM quantizes to 8 bits, in turn.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.quantized --ways fp8_per_channel

Both servers share the first GPU, the last one is the learner's. 128 prompts of 90 tokens, responses of 512 with
log-probabilities and seeds, random weights. A step is a round by the tokens of a response.
"""

import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.eight_billion import IDS, make_directory, random_weights
from benchmarks.gpu.one_engine import EngineLoad, time_server
from benchmarks.gpu.report import Report, parser_of
from conformance.doubles.instance import Instance, settings_for
from conformance.doubles.learner_side import connected, rendezvous
from rollmatch.dialects.native.sender import NativeSender

LOAD = EngineLoad(num_requests=128, prompt_len=90, response_len=512, first_id=1000, last_id=IDS - 1000)
PLAIN = "bfloat16"
MEMORY = {"kv_cache_memory_bytes": 14 << 30, "gpu_memory_utilization": 0.3, "max_num_seqs": 256}
BAR = 1.25
"""Tokens a second, with 8 bits by without."""


class Served:
    """One of the servers, and the learner's way to it."""

    def __init__(self, way, directory, folder):
        arguments = MEMORY if way == PLAIN else MEMORY | {"quantization": way}
        fields = {"dtype": "bfloat16", "max_model_len": 1024, "load_format": "dummy", "gpus": ("0",), "drain_s": 0.0}
        settings = settings_for(model=str(directory), engine_arguments=arguments, **fields)
        self.way, self.instance, self.version = way, Instance(settings, folder / f"{way}.log"), 0

    def connect(self, weights):
        self.instance.wait_ready()
        self.weights = weights
        meeting = rendezvous(timeout_s=120, join_timeout_s=120)
        self.sender = NativeSender(
            [connected(self.instance.url, timeout_s=240)], meeting, transport="direct", stage=False
        )

    def sync(self):
        self.version += 1
        self.sender.send(self.weights.items(), version=self.version)

    def step_ms(self, seed):
        return (
            time_server(self.instance.server, LOAD, seed, num_replicas=1, for_learning=True) / LOAD.response_len * 1000
        )


def measure(report, servers, *, rounds):
    """Each way in turn: a sync, a round of responses; the first of both sets things up."""
    steps, syncs = ({server.way: [] for server in servers} for _ in range(2))
    for number in range(rounds + 1):
        for place, server in enumerate(servers):
            report.sample(f"sync {server.way}", server.sync)
            step_ms = server.step_ms(1000 * number + place)
            report.say(f"{server.way}: {step_ms:.2f} ms a step{'' if number else ' (warm-up)'}")
            if number:
                steps[server.way].append(step_ms)
                syncs[server.way].append(report.samples[f"sync {server.way}"][-1])
        report.write(step_ms=steps, sync_s=syncs)
    plain = statistics.median(steps[PLAIN])
    gains = {way: plain / statistics.median(samples) for way, samples in steps.items() if way != PLAIN}
    report.write(tokens_per_second_by_plain=gains, bar=BAR)
    return ", ".join(f"{way}: {gain:.2f} x {PLAIN}'s tokens a second (bar {BAR})" for way, gain in gains.items())


def main():
    options = parse()
    torch.cuda.set_device(torch.device("cuda", torch.cuda.device_count() - 1))
    report = Report(options.results / "quantized.json")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        make_directory(directory)
        servers = [Served(way, directory, Path(folder)) for way in (PLAIN, *options.ways)]
        try:
            weights = random_weights(torch.device("cuda", torch.cuda.current_device()))
            for server in servers:
                server.connect(weights)
                report.say(f"{server.way}: ready")
            found = measure(report, servers, rounds=options.rounds)
        finally:
            for server in servers:
                server.instance.end()
    report.end(found)


def parse():
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=["fp8_per_channel"], help="vLLM's names of quantizations")
    return parser.parse_args()


if __name__ == "__main__":
    main()
