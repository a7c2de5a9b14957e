"""Log-probabilities of sampled tokens for next to nothing: kept in the engine's core, sent once a response.

vLLM sends three arrays for each token of each response to the process that asked, which makes a dictionary of them.
Its scheduler keeps them here instead, and the end of a response brings all of its values as bytes. Where ``num_top``
likeliest tokens are wanted, too, or text may end a response, vLLM's own way stays.
"""

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput

KEPT = "rollmatch_logprobs"
"""Marks a request (``extra_args``), and names the values that come with its end."""
SCHEDULER = f"{__name__}.make_scheduler"
"""vLLM's engine argument ``scheduler_cls``."""


def wanted() -> dict[str, Any]:
    """Fields of vLLM's ``SamplingParams`` that ask for it."""
    return {"logprobs": 0, "extra_args": {KEPT: True}}  # 0: the sampled token's only


def values_of(output: "RequestOutput", answer: "CompletionOutput") -> bytes | None:
    """Log-probabilities of the only answer of a finished output, float32, one per token; None where none are asked for.

    Another scheduler, which ``engine_arguments`` may name, leaves them where vLLM has them.
    """
    if answer.logprobs is None:
        return None
    kept: bytes | None = (output.kv_transfer_params or {}).get(KEPT)
    if kept is not None:
        return kept
    values = [place[token_id].logprob for place, token_id in zip(answer.logprobs, answer.token_ids, strict=True)]
    return np.asarray(values, dtype="<f4").tobytes()


class _Keeping:
    """Mixed into vLLM's scheduler."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.kept: dict[str, array[float]] = {}
        """Request id -> values of its tokens so far."""

    def add_request(self, request: Any) -> None:
        if request.sampling_params is not None and (request.sampling_params.extra_args or {}).get(KEPT):
            self.kept[request.request_id] = array("f")
        super().add_request(request)  # type: ignore[misc]

    def finish_requests(self, request_ids: Any, *rest: Any, **named: Any) -> Any:
        ended = super().finish_requests(request_ids, *rest, **named)  # type: ignore[misc]
        self.kept = {name: values for name, values in self.kept.items() if name in self.requests}  # type: ignore[attr-defined]
        return ended

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if model_runner_output.logprobs is not None and self.kept:
            model_runner_output.logprobs = _Step(model_runner_output, self.kept)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for client in outputs.values() if self.kept else ():
            for output in client.outputs:
                if output.finish_reason is not None and output.request_id in self.kept:
                    values = self.kept.pop(output.request_id).tobytes()
                    output.kv_transfer_params = (output.kv_transfer_params or {}) | {KEPT: values}
        return outputs


class _Step:
    """What the scheduler takes for vLLM's lists of one step: slices of marked requests are kept."""

    def __init__(self, output: Any, kept: dict[str, "array[float]"]) -> None:
        self.lists, self.req_ids, self.kept = output.logprobs, output.req_ids, kept
        self.sampled: list[float] = self.lists.logprobs[:, 0].tolist()
        """In each row, the sampled token's comes first."""

    def slice_request(self, index: int, num_positions: int) -> Any:
        values = self.kept.get(self.req_ids[index])
        if values is None:
            return self.lists.slice_request(index, num_positions)
        rows = self.lists.cu_num_generated_tokens
        first = index if rows is None else rows[index]
        values.extend(self.sampled[first : first + num_positions])
        return None


def make_scheduler(*arguments: Any, vllm_config: Any, **named: Any) -> Any:
    """The scheduler that vLLM would choose itself, which keeps log-probabilities. vLLM's engine core calls it."""
    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Chosen
    else:
        from vllm.v1.core.sched.scheduler import Scheduler as Chosen
    return type(Chosen.__name__, (_Keeping, Chosen), {})(*arguments, vllm_config=vllm_config, **named)
