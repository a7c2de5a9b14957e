"""Seeded requests whose prompt is computed in several steps, on a CPU."""

from functools import cache
from typing import Any

import numpy as np
import torch


@cache  # each engine of a process asks for it, and so do plugins
def draw_for_whole_prompts() -> None:
    """Before vLLM builds a model: let a step draw random numbers for those requests only whose token it keeps.

    A step that computes a part of a prompt samples, too, and throws the token away. vLLM 0.26 to 0.32 then sets the
    request's generator back by an offset, which generators of CPUs do not have: the engine dies. Prompts are split
    where a step is full, where images are more than a step encodes, and where a response under way is computed again.
    """
    if torch.cuda.is_available():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample = CPUModelRunner.sample_tokens

    def sample_tokens(self: Any, *arguments: Any, **named: Any) -> Any:
        generators = self.input_batch.generators
        partial = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        kept_back = {row: generators.pop(row) for row in partial if row in generators}
        try:
            return sample(self, *arguments, **named)
        finally:
            generators.update(kept_back)

    CPUModelRunner.sample_tokens = sample_tokens
