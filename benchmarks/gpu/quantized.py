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
from benchmarks.gpu.ways import OurServers

LOAD = EngineLoad(num_requests=128, prompt_len=90, response_len=512, first_id=1000, last_id=IDS - 1000)
PLAIN = "bfloat16"
MEMORY = {"kv_cache_memory_bytes": 14 << 30, "gpu_memory_utilization": 0.3, "max_num_seqs": 256}
BAR = 1.25
"""Tokens a second, with 8 bits by without."""


def served(way, directory, folder):
    """One server, as ``OurServers`` starts it."""
    folder.mkdir()
    arguments = MEMORY if way == PLAIN else MEMORY | {"quantization": way}
    return OurServers(directory, 1, folder, arguments, max_model_len=1024)


def measure(report, servers, *, rounds):
    """Each way in turn: a sync, a round of responses; the first round sets things up."""
    steps = {way: [] for way in servers}
    for number in range(rounds + 1):
        for place, (way, sync) in enumerate(servers.items()):
            report.sample(f"sync {way}", sync)
            (instance,), seed = sync.instances, 1000 * number + place
            took = time_server(instance.server, LOAD, seed, num_replicas=1, for_learning=True)
            step_ms = took / LOAD.response_len * 1000
            report.say(f"{way}: {step_ms:.2f} ms a step{'' if number else ' (warm-up)'}")
            steps[way].append(step_ms)
        if not number:
            report.samples.clear()
            steps = {way: [] for way in servers}
        report.write(step_ms=steps)
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
        servers = {way: served(way, directory, Path(folder, way)) for way in (PLAIN, *options.ways)}
        try:
            weights = random_weights(torch.device("cuda", torch.cuda.current_device()))
            for way, server in servers.items():
                server.connect(weights)
                report.say(f"{way}: ready")
            found = measure(report, servers, rounds=options.rounds)
        finally:
            for server in servers.values():
                server.end()
    report.end(found)


def parse():
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=["fp8_per_channel"], help="vLLM's names of quantizations")
    return parser.parse_args()


if __name__ == "__main__":
    main()
