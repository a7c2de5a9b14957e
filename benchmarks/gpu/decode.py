"""Decoding 128 responses on one GPU, 4B or 135M shape: our server as learners ask it, ``LLM.generate``, in turn.

Ways: ``plain``, vLLM's ``LLM.generate`` that returns ids alone; ``own``, the same with its log-probabilities of sampled
tokens and a seed for each request; ``served``, our server, ids alone; ``learning``, our server with both, as learners
ask. No way makes text. A step is a round by the tokens of a response, the prompts' pass included.
"""

import statistics

from benchmarks.gpu.one_engine import EngineLoad, OneEngine, time_server
from benchmarks.gpu.random_qwen3 import SHAPE, SHAPE_135M
from conformance.doubles.instance import Instance, settings_for

LOAD = EngineLoad(num_requests=128, prompt_len=90, response_len=512, first_id=1000, last_id=SHAPE["vocab_size"] - 1000)
SMALL_LOAD = EngineLoad(
    num_requests=128, prompt_len=90, response_len=48, first_id=1000, last_id=SHAPE_135M["vocab_size"] - 1000
)
BOTH = {"dtype": "bfloat16", "max_model_len": 1024}
ARGUMENTS = {"kv_cache_memory_bytes": 16 << 30, "gpu_memory_utilization": 0.3, "max_num_seqs": 256}
WAYS = ("plain", "own", "served", "learning")
BARS = {"learning / plain": 1.03, "learning / own": 0.97}


def measure(model, folder, load=LOAD, *, rounds, say):
    """Way -> milliseconds of a step, one for each round after one of warm-up; ``model``: its directory."""
    with (folder / "engine.log").open("w") as log:
        engine = OneEngine(load, log, gpu="0", model=str(model), **BOTH, **ARGUMENTS)
    settings = settings_for(model=str(model), gpus=("0",), engine_arguments=ARGUMENTS, **BOTH)
    instance = Instance(settings, folder / "server.log")
    try:
        instance.wait_ready()
        engine.wait_ready()
        say("decoding: both engines are ready")
        return _rounds(engine, instance.server, load, rounds=rounds, say=say)
    finally:
        instance.end()
        engine.end()


def _rounds(engine, server, load, *, rounds, say):
    samples = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for place, way in enumerate(WAYS):
            seed = 1000 * number + place
            if way in ("plain", "own"):
                took = engine.run(seed, way)
            else:
                took = time_server(server, load, seed, num_replicas=1, for_learning=way == "learning")
            step_ms = took / load.response_len * 1000
            say(f"decoding, {way}: {step_ms:.2f} ms a step{'' if number else ' (warm-up)'}")
            if number:
                samples[way].append(step_ms)
    return samples


def ratios(samples):
    """Of medians, for each bar."""
    medians = {way: statistics.median(values) for way, values in samples.items()}
    pairs = {name: name.split(" / ") for name in BARS}
    return {name: medians[one] / medians[other] for name, (one, other) in pairs.items()}
