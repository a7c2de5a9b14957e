"""Tokens per second of one server with a replica per GPU, beside ``LLM.generate`` on one GPU times their number.

    VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.server_throughput --results benchmarks/results

Both have the shape of 8B, the same engine arguments and 256 requests per GPU: 512 tokens of prompt, 256 of response,
sampled. Weights are zeros, which every engine reads from the same file. Samples are seconds, taken in turn.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.eight_billion import IDS, NUM_LAYERS, make_directory
from benchmarks.gpu.machine import describe
from conformance.wire.calls import text_batch
from conformance.wire.instance import ENVIRONMENT, Instance, settings_for

NUM_REQUESTS, PROMPT_LEN, RESPONSE_LEN = 256, 512, 256
BAR = 0.95
ARGUMENTS = {
    "kv_cache_memory_bytes": 24 << 30,
    "gpu_memory_utilization": 0.3,
    "max_num_seqs": NUM_REQUESTS,
    "max_num_batched_tokens": 16384,
}
MAX_MODEL_LEN = 1024
READY, TOOK = "ready", "took "
PLAIN = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
"""``LLM`` as its users have it: the engine in a process of its own."""


class OneEngine:
    """``LLM.generate`` in a process of its own, on the first GPU."""

    def __init__(self, model, arguments, log):
        command = [sys.executable, "-m", "benchmarks.gpu.server_throughput", "--engine", json.dumps([model, arguments])]
        environment = os.environ | PLAIN | {"CUDA_VISIBLE_DEVICES": "0"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )

    def wait_ready(self):
        self._line(READY)

    def run(self, seed):
        """Seconds of one round."""
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        return float(self._line(TOOK).removeprefix(TOOK))

    def _line(self, beginning):
        """The next line of ours; vLLM writes to the same place."""
        while line := self.process.stdout.readline():
            if line.startswith(beginning):
                return line
        raise AssertionError(f"the engine ended with {self.process.wait()}")

    def end(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)


def prompts_of(seed, num_requests):
    """Never the same, so that no cache helps."""
    draw = random.Random(seed)
    return [[draw.randrange(1000, IDS - 1000) for _ in range(PROMPT_LEN)] for _ in range(num_requests)]


def serve_engine(model, arguments):
    """The process of ``OneEngine``: a seed in, the seconds of a round out."""
    from vllm import LLM, SamplingParams

    engine = LLM(model, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, skip_tokenizer_init=True, **arguments)
    rules = SamplingParams(temperature=1.0, max_tokens=RESPONSE_LEN, ignore_eos=True, detokenize=False)
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": ids} for ids in prompts_of(int(line), NUM_REQUESTS)]
        began = time.perf_counter()
        outputs = engine.generate(prompts, rules, use_tqdm=False)
        took = time.perf_counter() - began
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == NUM_REQUESTS * RESPONSE_LEN
        sys.stdout.write(f"{TOOK}{took}\n")
        sys.stdout.flush()


def time_server(server, seed, num_requests):
    """Seconds of one call."""
    batch = text_batch(prompts_of(seed, num_requests))
    began = time.perf_counter()
    responses, _ = server.infer(batch, max_tokens=RESPONSE_LEN, ignore_eos=True, temperature=1.0)
    took = time.perf_counter() - began
    assert {len(ids) for ids in responses} == {RESPONSE_LEN}
    return took


def measure(options, folder, say):
    num_gpus = torch.cuda.device_count()
    model = folder / "model"
    make_directory(model, options.layers)
    with (folder / "engine.log").open("w") as log:
        engine = OneEngine(str(model), ARGUMENTS, log)
    settings = settings_for(
        model=str(model),
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        data_parallel_size=num_gpus,
        gpus=tuple(map(str, range(num_gpus))),
        engine_arguments=ARGUMENTS,
    )
    instance = Instance(settings, folder / "server.log")
    try:
        instance.wait_ready()
        say("the server is ready")
        engine.wait_ready()
        say("the engine is ready")
        samples = {"engine": [], "server": []}
        for number in range(options.rounds + 1):
            for name in samples:
                seed = 1000 * number + len(name)
                ours = name == "server"
                took = time_server(instance.server, seed, num_gpus * NUM_REQUESTS) if ours else engine.run(seed)
                tokens = RESPONSE_LEN * NUM_REQUESTS * (num_gpus if ours else 1)
                say(f"{name}: {took:.2f} s, {tokens / took:,.0f} tok/s{'' if number else ' (warm-up)'}")
                if number:
                    samples[name].append(took)
    finally:
        instance.end()
        engine.end()
    one, all_ = (statistics.median(samples[name]) for name in ("engine", "server"))
    return {"num_gpus": num_gpus, "samples_s": samples, "server over engine x GPUs": one / all_, "bar": BAR}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        return serve_engine(*json.loads(options.engine))
    began = time.monotonic()

    def say(text):
        sys.stdout.write(f"[{time.monotonic() - began:6.1f} s] {text}\n")
        sys.stdout.flush()

    options.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        told = {"machine": describe()} | measure(options, Path(folder), say)
    path = options.results / f"server_throughput_{told['num_gpus']}.json"
    path.write_text(json.dumps(told, indent=1) + "\n")
    say(f"server over engine x {told['num_gpus']}: {told['server over engine x GPUs']:.3f} (bar {BAR}), {path}")
    return None


if __name__ == "__main__":
    main()
