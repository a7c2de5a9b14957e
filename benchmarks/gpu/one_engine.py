"""``LLM.generate`` in a process of its own on one GPU, and the same requests to a server: tokens per second of each."""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from conformance.doubles.instance import ENVIRONMENT
from conformance.judge.calls import text_batch

READY, TOOK = "ready", "took "
PLAIN = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
"""``LLM`` as its users have it: the engine in a process of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Requests of one round to one engine: random ids, never the same, so that no cache helps; sampled."""

    num_requests: int
    prompt_len: int
    response_len: int
    first_id: int
    last_id: int
    """Of prompts."""

    def prompts(self, seed, *, times=1):
        draw = random.Random(seed)
        ids = range(self.first_id, self.last_id + 1)
        return [draw.choices(ids, k=self.prompt_len) for _ in range(self.num_requests * times)]

    @property
    def num_tokens(self):
        """Response tokens of a round."""
        return self.num_requests * self.response_len


class OneEngine:
    """A seed goes in, the seconds of a round come out."""

    def __init__(self, load, log, *, gpu, **arguments):
        """``arguments``: of ``LLM``."""
        self.log = Path(log.name)
        command = [sys.executable, "-m", "benchmarks.gpu.one_engine", json.dumps([asdict(load), arguments])]
        environment = os.environ | PLAIN | {"CUDA_VISIBLE_DEVICES": gpu}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )

    def wait_ready(self):
        self._line(READY)

    def run(self, seed, way="plain"):
        """Seconds of one round. ``own``: with vLLM's own log-probabilities of sampled tokens, and a seed each."""
        self.process.stdin.write(f"{seed} {way}\n")
        self.process.stdin.flush()
        return float(self._line(TOOK).removeprefix(TOOK))

    def _line(self, beginning):
        """The next line of ours; vLLM writes to the same place."""
        while line := self.process.stdout.readline():
            if line.startswith(beginning):
                return line
        raise AssertionError(f"the engine ended with {self.process.wait()}:\n{self.log.read_text()[-2000:]}")

    def end(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)


def time_server(server, load, seed, *, num_replicas, for_learning=False):
    """Seconds of one call with a round for each replica. ``for_learning``: as learners ask, with a seed each."""
    batch = text_batch(load.prompts(seed, times=num_replicas))
    if for_learning:
        batch = [request | {"seed": place} for place, request in enumerate(batch)]
    sampling = {"max_tokens": load.response_len, "ignore_eos": True, "temperature": 1.0, "logprobs": for_learning}
    began = time.perf_counter()
    responses, _ = server.infer(batch, **sampling)
    took = time.perf_counter() - began
    assert {len(ids) for ids in responses} == {load.response_len}
    return took


def compare(server, engine, load, *, num_replicas, rounds, say):
    """Rounds taken in turn after one of warm-up; name -> seconds of each."""
    samples = {"engine": [], "server": []}
    for number in range(rounds + 1):
        for name in samples:
            seed = 1000 * number + len(name)
            ours = name == "server"
            took = time_server(server, load, seed, num_replicas=num_replicas) if ours else engine.run(seed)
            tokens = load.num_tokens * (num_replicas if ours else 1)
            say(f"{name}: {took:.2f} s, {tokens / took:,.0f} tok/s{'' if number else ' (warm-up)'}")
            if number:
                samples[name].append(took)
    return samples


def main(load, arguments):
    """The engine's process."""
    from vllm import LLM, SamplingParams

    load = EngineLoad(**load)
    engine = LLM(**arguments)
    rules = {"temperature": 1.0, "max_tokens": load.response_len, "ignore_eos": True, "detokenize": False}
    ways = {
        "plain": [SamplingParams(**rules)] * load.num_requests,
        "own": [SamplingParams(**rules, logprobs=0, seed=place) for place in range(load.num_requests)],
    }
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        seed, way = line.split()
        prompts = [{"prompt_token_ids": ids} for ids in load.prompts(int(seed))]
        began = time.perf_counter()
        outputs = engine.generate(prompts, ways[way], use_tqdm=False)
        took = time.perf_counter() - began
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == load.num_tokens
        sys.stdout.write(f"{TOOK}{took}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
