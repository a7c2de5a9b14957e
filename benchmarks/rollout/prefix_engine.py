"""One engine, VinePPO's requests: nine continuations of every state of a long response; what they cost, as JSON.

python benchmarks/rollout/prefix_engine.py on|off [BLOCK_SIZE] [shortest|longest|warm]

``warm``: the longest state alone first, one token long, then all.
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from conformance.doubles.digits import MODEL, load_model, template_of
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.records import RolloutRequest, Sample
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.vllm_colocate import EngineSettings, VllmColocateBackend

PROMPT_LEN, STEP_LEN, NUM_STATES, NUM_CONTINUATIONS, MAX_NEW_TOKENS = 2600, 150, 4, 9, 8
DECODING = Decoding(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)


def requests_of() -> list[RolloutRequest]:
    """States nest: each is a prefix of the next, as along one response."""
    ids = tuple(int(i) for i in np.random.default_rng(0).integers(0, 256, size=PROMPT_LEN + STEP_LEN * NUM_STATES))
    sample = Sample(sample_id=0, origin="x:1", images=(), messages=(("user", "?"),))
    return [
        RolloutRequest(
            request_id=f"{state}.{k}",
            sample=sample,
            prompt_token_ids=ids[:PROMPT_LEN],
            prefix_token_ids=ids[PROMPT_LEN : PROMPT_LEN + STEP_LEN * state],
            seed=1 + state * NUM_CONTINUATIONS + k,
        )
        for state in range(NUM_STATES)
        for k in range(NUM_CONTINUATIONS)
    ]


def computed_by(backend: VllmColocateBackend) -> int:
    """Prompt tokens that the engine has run through the model so far, by its own counters."""
    counters = {metric.name: getattr(metric, "value", 0) for metric in backend._engine.get_metrics()}
    if not counters.get("vllm:prefix_cache_queries"):
        return int(counters["vllm:prompt_tokens"])
    return int(counters["vllm:prefix_cache_queries"] - counters["vllm:prefix_cache_hits"])


def least_computed(states: Iterable[int], *, block_size: int) -> int:
    """Prefill of nested states of these lengths, in any order: what no whole block holds is computed by each request.

    A request's last token is never taken from the cache. Two requests of 40 tokens, blocks of 32:

    >>> least_computed([40, 40], block_size=32), least_computed([33, 33], block_size=32)
    (48, 34)
    """
    known = total = 0
    for length in states:
        whole = (length - 1) // block_size * block_size
        total += length - min(known, whole)
        known = max(known, length // block_size * block_size)
    return total


def in_order(asked: Sequence[RolloutRequest], order: str) -> list[RolloutRequest]:
    """Requests as they are sent."""
    if order == "shortest":
        return list(asked)
    longest = sorted(asked, key=lambda request: -len(request.token_ids))
    return longest if order == "longest" else [replace(longest[0], request_id="warm", max_new_tokens=1), *asked]


def main(caching: str, block_size: str = "32", order: str = "shortest") -> None:
    settings = EngineSettings(
        model=str(MODEL),
        dtype="float32",
        max_model_len=4096,
        engine_arguments={
            "seed": 0,
            "kv_cache_memory_bytes": 1 << 30,
            "enforce_eager": True,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 4096,
            "enable_chunked_prefill": False,  # vLLM 0.32 on a CPU cannot cut a prompt whose sampling is seeded
            "block_size": int(block_size),
            "enable_prefix_caching": caching == "on",
            "disable_log_stats": False,
            "limit_mm_per_prompt": {"image": 0, "video": 0},
        },
    )
    backend = VllmColocateBackend(settings, template_of(), Ranks())
    backend.push(merged_weights(load_model()), version=1)
    asked = requests_of()
    figures: dict[str, float] = {"one state: unique": PROMPT_LEN, "all states: unique": len(asked[-1].token_ids)}
    for name, part in (("one state", asked[:NUM_CONTINUATIONS]), ("all states", asked)):
        part = in_order(part, order)
        began, before = time.perf_counter(), computed_by(backend)
        rollouts = backend.generate(part, DECODING)
        figures[name] = time.perf_counter() - began
        figures[f"{name}: computed"] = computed_by(backend) - before
        lengths = [len(request.token_ids) for request in part]
        figures[f"{name}: least"] = least_computed(lengths, block_size=int(block_size))
        figures[f"{name}: generated"] = sum(len(rollout.response_token_ids) for rollout in rollouts)
        backend._engine.reset_prefix_cache()
    sys.stdout.write(f"RESULT{json.dumps(figures)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
