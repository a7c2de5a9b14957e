"""vLLM's scheduler, which keeps what is wanted of a response in the engine's core until its end.

**Log-probabilities** of sampled tokens. vLLM sends three arrays for each token of each response to the process that
asked, which makes a dictionary of them. Here the end of a response brings all of its values as bytes. Where ``num_top``
likeliest tokens are wanted, too, or text may end a response, vLLM's own way stays.

**Log-probabilities of prompt tokens** likewise: vLLM decodes all of them in one turn of that process' event loop.

**Where the engine was emptied** in the midst of a response, so that newer weights write the rest. Only the core knows
how many tokens a response had then. vLLM 0.26 has no count of its own.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput
    from vllm.logprobs import LogprobsOnePosition

LOGPROBS, RUNS, OF_PROMPT = "rollmatch_logprobs", "rollmatch_runs", "rollmatch_prompt_logprobs"
"""Mark a request (``extra_args``), and name the values that come with its end."""
SCHEDULER = f"{__name__}.make_scheduler"
"""vLLM's engine argument ``scheduler_cls``."""
_ROWS_AT_ONCE, _CONTEXT = 16, 4
"""Places of a prompt that are decoded at once, and those before them, of which vLLM completes characters."""


def wanted(*, logprobs: bool, runs: bool = False) -> dict[str, Any]:
    """Fields of vLLM's ``SamplingParams`` that ask for log-probabilities, and for ``runs_of``."""
    names = [name for name, is_wanted in ((LOGPROBS, logprobs), (RUNS, runs)) if is_wanted]
    sampled = {"logprobs": 0} if logprobs else {}  # 0: the sampled token's only
    return sampled | ({"extra_args": dict.fromkeys(names, True)} if names else {})


def values_of(output: "RequestOutput", answer: "CompletionOutput") -> bytes | None:
    """Log-probabilities of the only answer of a finished output, float32, one per token; None where none are asked for.

    Another scheduler, which ``engine_arguments`` may name, leaves them where vLLM has them.
    """
    if answer.logprobs is None:
        return None
    kept: bytes | None = (output.kv_transfer_params or {}).get(LOGPROBS)
    if kept is not None:
        return kept
    values = [place[token_id].logprob for place, token_id in zip(answer.logprobs, answer.token_ids, strict=True)]
    return np.asarray(values, dtype="<f4").tobytes()


def runs_of(output: "RequestOutput") -> tuple[tuple[int, int], ...]:
    """Runs of (how often the engine had been emptied, number of tokens written then); empty where none were asked for.

    A response of 9 tokens whose engine was emptied for the third time after its 5th: ``((2, 5), (3, 4))``.
    """
    runs: list[tuple[int, int]] = (output.kv_transfer_params or {}).get(RUNS, [])
    return tuple((number, length) for number, length in runs)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Likeliest tokens at each place of a prompt, decoded as vLLM does it when they are read, which a thread may do."""

    token_ids: "np.ndarray[Any, np.dtype[np.int32]]"
    """[places after the first, tokens]."""
    logprobs: "np.ndarray[Any, np.dtype[np.float32]]"
    ranks: "np.ndarray[Any, np.dtype[np.int32]]"
    """Of the prompt's own tokens."""
    tokenizer: Any
    """None where texts are not wanted."""

    def __iter__(self) -> "Iterator[LogprobsOnePosition]":
        """One place after the other; the first one has none."""
        from vllm.v1.engine.logprobs import LogprobsProcessor
        from vllm.v1.outputs import LogprobsTensors

        num_top = self.token_ids.shape[1] - 1
        sampling = SimpleNamespace(num_logprobs=None, prompt_logprobs=num_top, flat_logprobs=True)
        processor: Any = LogprobsProcessor.from_new_request(self.tokenizer, SimpleNamespace(sampling_params=sampling))
        yield {}
        for start in range(0, len(self.ranks), _ROWS_AT_ONCE):
            some, known = slice(start, start + _ROWS_AT_ONCE), len(processor.prompt_logprobs)
            tensors = LogprobsTensors(self.token_ids[some], self.logprobs[some], self.ranks[some])
            came = {"new_logprobs": None, "new_prompt_logprobs_tensors": tensors, "prompt_token_id_logprobs": None}
            processor.update_from_output(SimpleNamespace(**came))
            yield from processor.prompt_logprobs[known:]
            processor.prompt_logprobs = processor.prompt_logprobs[-_CONTEXT:]


def prompt_rows_of(output: "RequestOutput", tokenizer: Any) -> PromptRows | None:
    """Those of a finished output; None where the scheduler has kept none."""
    kept = (output.kv_transfer_params or {}).get(OF_PROMPT)
    if kept is None:
        return None
    ids, values, ranks = (np.frombuffer(raw, dtype=kind) for raw, kind in zip(kept, ("<i4", "<f4", "<i4"), strict=True))
    shape = len(ranks), -1
    return PromptRows(ids.reshape(shape), values.reshape(shape), ranks, tokenizer)


class _Keeping:
    """Mixed into vLLM's scheduler."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.logprobs: dict[str, array[float]] = {}
        """Request id -> values of its tokens so far."""
        self.num_emptied = 0
        """How often requests that run have lost all keys and values."""
        self.runs: dict[str, tuple[Any, list[tuple[int, int]]]] = {}
        """Request id -> the request, and runs that have ended."""
        self.of_prompts: dict[str, list[bytes]] = {}
        """Request id -> ids, values and ranks of its prompt's tokens."""

    def add_request(self, request: Any) -> None:
        sampling = request.sampling_params
        marks = (sampling.extra_args or {}) if sampling is not None else {}
        if marks.get(LOGPROBS):
            self.logprobs[request.request_id] = array("f")
        if marks.get(RUNS):
            self.runs[request.request_id] = request, []
        if marks.get(OF_PROMPT):
            self.of_prompts[request.request_id] = []
        super().add_request(request)  # type: ignore[misc]

    def finish_requests(self, request_ids: Any, *rest: Any, **named: Any) -> Any:
        ended = super().finish_requests(request_ids, *rest, **named)  # type: ignore[misc]
        for kept in (self.logprobs, self.runs, self.of_prompts):
            for name in [name for name in kept if name not in self.requests]:  # type: ignore[attr-defined]
                del kept[name]
        return ended

    def reset_prefix_cache(self, reset_running_requests: bool = False, *rest: Any, **named: Any) -> Any:
        if reset_running_requests:
            for request, runs in self.runs.values():
                self._end_run(request, runs)
            self.num_emptied += 1
        return super().reset_prefix_cache(reset_running_requests, *rest, **named)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if model_runner_output.logprobs is not None and self.logprobs:
            model_runner_output.logprobs = _Step(model_runner_output, self.logprobs)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for client in outputs.values() if self.logprobs or self.runs or self.of_prompts else ():
            for output in client.outputs:
                if output.request_id in self.of_prompts and output.new_prompt_logprobs_tensors is not None:
                    self._keep(output)
                if output.finish_reason is not None and (kept := self._take(output.request_id)):
                    output.kv_transfer_params = (output.kv_transfer_params or {}) | kept
        return outputs

    def _keep(self, output: Any) -> None:
        """What vLLM would send of the prompt; a prompt that was computed again comes again."""
        tensors = output.new_prompt_logprobs_tensors
        if len(tensors.selected_token_ranks):
            kinds = zip(tensors[:3], ("<i4", "<f4", "<i4"), strict=True)
            self.of_prompts[output.request_id] = [each.numpy().astype(kind).tobytes() for each, kind in kinds]
        output.new_prompt_logprobs_tensors = None

    def _take(self, name: str) -> dict[str, Any]:
        """What was kept of a request that has ended."""
        kept: dict[str, Any] = {}
        if name in self.logprobs:
            kept[LOGPROBS] = self.logprobs.pop(name).tobytes()
        if name in self.runs:
            request, runs = self.runs.pop(name)
            self._end_run(request, runs)
            kept[RUNS] = runs
        if rows := self.of_prompts.pop(name, None):
            kept[OF_PROMPT] = rows
        return kept

    def _end_run(self, request: Any, runs: list[tuple[int, int]]) -> None:
        """All that the request has written since its last run is one."""
        length = request.num_output_tokens - sum(length for _, length in runs)
        if length:
            runs.append((self.num_emptied, length))


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
    """The scheduler that vLLM would choose itself, with what is kept. vLLM's engine core calls it."""
    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Chosen
    else:
        from vllm.v1.core.sched.scheduler import Scheduler as Chosen
    return type(Chosen.__name__, (_Keeping, Chosen), {})(*arguments, vllm_config=vllm_config, **named)
