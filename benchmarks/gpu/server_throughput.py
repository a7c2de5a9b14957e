"""Tokens per second of one server with a replica per GPU, beside ``LLM.generate`` on one GPU times their number.

    VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.server_throughput --results benchmarks/results

Both have the shape of 8B, the same engine arguments and 256 requests per GPU: 512 tokens of prompt, 256 of response,
sampled. Weights are zeros, which every engine reads from the same file. Samples are seconds, taken in turn.
"""

import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.eight_billion import IDS, NUM_LAYERS, make_directory
from benchmarks.gpu.one_engine import EngineLoad, OneEngine, compare
from benchmarks.gpu.report import Report, parser_of
from conformance.doubles.instance import Instance, settings_for

LOAD = EngineLoad(num_requests=256, prompt_len=512, response_len=256, first_id=1000, last_id=IDS - 1000)
BAR = 0.95
ARGUMENTS = {
    "kv_cache_memory_bytes": 24 << 30,
    "gpu_memory_utilization": 0.3,
    "max_num_seqs": LOAD.num_requests,
    "max_num_batched_tokens": 16384,
}
BOTH = {"dtype": "bfloat16", "max_model_len": 1024}


def measure(options, folder, say):
    num_gpus = torch.cuda.device_count()
    model = str(folder / "model")
    make_directory(model, options.layers)
    with (folder / "engine.log").open("w") as log:
        engine = OneEngine(LOAD, log, gpu="0", model=model, skip_tokenizer_init=True, **BOTH, **ARGUMENTS)
    gpus = tuple(map(str, range(num_gpus)))
    settings = settings_for(model=model, data_parallel_size=num_gpus, gpus=gpus, engine_arguments=ARGUMENTS, **BOTH)
    instance = Instance(settings, folder / "server.log")
    try:
        instance.wait_ready()
        say("the server is ready")
        engine.wait_ready()
        say("the engine is ready")
        samples = compare(instance.server, engine, LOAD, num_replicas=num_gpus, rounds=options.rounds, say=say)
    finally:
        instance.end()
        engine.end()
    one, all_ = (statistics.median(samples[name]) for name in ("engine", "server"))
    return {"num_gpus": num_gpus, "samples_s": samples, "server over engine x GPUs": one / all_, "bar": BAR}


def main():
    options = parse()
    report = Report(options.results / f"server_throughput_{torch.cuda.device_count()}.json")
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options, Path(folder), report.say)
    report.write(**figures)
    report.end(f"server over engine x {figures['num_gpus']}: {figures['server over engine x GPUs']:.3f} (bar {BAR})")


def parse():
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
