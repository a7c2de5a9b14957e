"""One engine: vLLM's ``AsyncLLM`` with our worker extension. The only module of the server that imports vllm."""

import asyncio
import copy
import inspect
import os
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rollmatch.errors import LaunchError
from rollmatch.server import scheduler
from rollmatch.server.failures import Refusal, WorkerDead
from rollmatch.server.prompts import EnginePrompt, GenerateRequest
from rollmatch.server.settings import ServerSettings
from rollmatch.startup import loading
from rollmatch.weights.nccl import forbid_multicast

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs, LogprobsOnePosition

EXTENSION = "rollmatch.weights.worker.extension.WorkerExtension"
_RESET_PAUSE_S, _END_S, _LONGEST_PROBLEM = 0.001, 0.5, 400
_RESPONSES_AT_ONCE, _OUTPUTS_AT_ONCE = 16, "4"
"""Responses to one prompt that are begun, and outputs of vLLM's engine that are read, in one turn of the event loop:
with 20 log-probabilities each takes a millisecond.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """One sampled response."""

    prompt_token_ids: list[int]
    response_token_ids: list[int]
    finish_reason: str
    stop_token_id: int | None
    logprobs: bytes | None
    """float32, one per response token."""
    runs: tuple[tuple[int, int], ...] = ()
    """As ``scheduler.runs_of``."""
    policy_versions: tuple[tuple[int, int], ...] = ()
    """Runs of (version, number of tokens that it wrote), in order, which the pool makes of ``runs``."""
    top: "Sequence[LogprobsOnePosition]" = ()
    """For each response token, ids with vLLM's log-probabilities, the sampled one among them; empty unless more than
    that was requested.
    """
    prompt_logprobs: "Iterable[LogprobsOnePosition] | None" = None
    """The same for each prompt token; empty for the first."""

    def values(self) -> list[float]:
        """Log-probabilities as numbers; empty where there are none."""
        return list(np.frombuffer(self.logprobs or b"", dtype="<f4").tolist())

    def likeliest(self) -> Iterator[list[tuple[int, float]]]:
        """For each response token, ids with log-probabilities, likeliest first; the sampled one alone unless more were
        requested.
        """
        if not self.top:
            yield from ([pair] for pair in zip(self.response_token_ids, self.values()))
        for place in self.top:
            ranked = sorted(place.items(), key=lambda entry: entry[1].rank or 0)
            yield [(token_id, max(entry.logprob, IMPOSSIBLE)) for token_id, entry in ranked]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePart:
    """What an engine hands out of a call at a time: all of it, or what was written since the part before."""

    output: "RequestOutput"
    num_tokens: int
    """Response tokens in it."""
    is_last: bool


class VllmReplica:
    """An ``AsyncLLM``; its engine core, and with it the worker, is a process of its own."""

    reset_limit_s = 4.0
    """How long caches that are in use are waited for."""

    def __init__(self, settings: ServerSettings, *, index: int) -> None:
        with loading():
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        size = settings.tensor_parallel_size
        arguments = {
            "model": settings.model,
            "dtype": settings.dtype,
            "max_model_len": settings.max_model_len,
            "tensor_parallel_size": size,
            "load_format": settings.load_format,
            "worker_extension_cls": EXTENSION,
            "enable_log_requests": False,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
            "scheduler_cls": scheduler.SCHEDULER,
        } | ({"distributed_executor_backend": "uni"} if size == 1 else {})
        if settings.gpus:
            forbid_multicast()
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpus[index * size : (index + 1) * size])
            if settings.data_parallel_size > 1:
                # They start side by side: a fork would keep locks for ever that threads of the others held.
                os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        arguments |= settings.engine_arguments
        first_seed = arguments.get("seed", 0)
        if isinstance(first_seed, int):
            arguments["seed"] = first_seed + index  # with one seed, all replicas would write the same responses
        os.environ.setdefault("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", _OUTPUTS_AT_ONCE)
        try:
            config = AsyncEngineArgs(**arguments).create_engine_config()
        except ValueError as error:  # pydantic's too
            problem = " ".join(str(error).split())[:_LONGEST_PROBLEM]
            remedy = "Serve a model that this vLLM knows, with arguments that it takes."
            raise LaunchError(problem, code="engine-refuses-model", key="model.model", remedy=remedy) from error
        if not settings.gpus:
            # vLLM has just set "spawn" for CPUs; a fork finds torch and vLLM loaded: 1 s of CPU in place of 8.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self.engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)

    @property
    def dtype(self) -> str:
        """What the weights are held in, as torch names it."""
        return str(self.engine.model_config.dtype).removeprefix("torch.")

    @staticmethod
    def params_of(request: GenerateRequest, *, seed: int | None) -> "SamplingParams":
        """How one response to a request is sampled, as vLLM spells it. Errors: ``Refusal``."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        sampling = request.sampling
        is_kept = sampling.logprobs and not (request.num_top or request.stop)
        logprobs = {"logprobs": request.num_top if sampling.logprobs else None}
        try:
            return SamplingParams(
                **sampling.model_dump(exclude={"logprobs", "logit_bias", "stop_token_ids"}),
                stop_token_ids=list(sampling.stop_token_ids),
                logit_bias=dict(sampling.logit_bias) or None,
                **({} if is_kept else logprobs),
                prompt_logprobs=request.num_prompt_top,
                **scheduler.wanted(logprobs=is_kept, runs=request.may_move),
                stop=list(request.stop),
                structured_outputs=StructuredOutputsParams(regex=request.regex) if request.regex else None,
                seed=seed,
                detokenize=bool(request.stop),
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        except ValueError as error:
            raise Refusal(str(error), code="engine-refused", key="requests") from error

    async def generate(self, prompt: EnginePrompt, params: "SamplingParams", request_id: str) -> EngineOutput:
        """Sample one response; cancelling frees its place. Errors: ``Refusal``, ``WorkerDead``."""
        last = None
        async for part in self._call(prompt, params, request_id, first=0):
            last = part
        assert last is not None
        return _output_of(last.output, num_top=params.logprobs or 0)

    async def stream(
        self, prompt: EnginePrompt, params: "SamplingParams", request_id: str, **options: object
    ) -> AsyncGenerator[EnginePart]:
        """Parts of the responses to one prompt as they are written; closing frees their place.

        Many responses are several calls of vLLM, which prepares all of one call in one turn of the event loop.
        ``options``: further keyword arguments of ``AsyncLLM.generate``. Errors: ``Refusal``, ``WorkerDead``.
        """
        from vllm.sampling_params import RequestOutputKind

        calls = []
        for first in range(0, params.n, _RESPONSES_AT_ONCE):
            some = copy.copy(params)
            some.n = min(_RESPONSES_AT_ONCE, params.n - first)
            some.seed = None if params.seed is None else params.seed + first  # as vLLM counts them within a call
            calls.append(self._call(prompt, some, f"{request_id}-{first}", first=first, **options))
        is_in_parts = params.output_kind != RequestOutputKind.FINAL_ONLY
        async with aclosing(_merged(calls, is_in_parts=is_in_parts)) as parts:
            async for part in parts:
                yield part

    async def _call(
        self, prompt: EnginePrompt, params: "SamplingParams", request_id: str, *, first: int, **options: object
    ) -> AsyncGenerator[EnginePart]:
        """One call of vLLM; ``first``: index of its first response."""
        given: dict[str, object] = {"prompt_token_ids": prompt.token_ids}
        params.update_from_generation_config({"eos_token_id": list(prompt.stop_ids)})  # ignore_eos keeps its meaning
        params.flat_logprobs = True
        tokenizer = self.engine.output_processor.tokenizer if params.detokenize else None
        if params.prompt_logprobs is not None:
            self._check_prompt_logprobs(params.prompt_logprobs)
            params.extra_args = (params.extra_args or {}) | {scheduler.OF_PROMPT: True}
        if prompt.images:
            given["multi_modal_data"] = {"image": prompt.images}
        from vllm import exceptions
        from vllm.v1.engine.exceptions import EngineGenerateError

        refused = getattr(exceptions, "VLLMClientError", exceptions.VLLMValidationError)  # vLLM 0.26 has no common base

        try:
            with _engine_death_as_ours():
                async with aclosing(self.engine.generate(given, params, request_id, **options)) as outputs:
                    async for output in outputs:
                        for answer in output.outputs:
                            answer.index += first
                            _condense(answer.logprobs)
                        if (rows := scheduler.prompt_rows_of(output, tokenizer)) is not None:
                            output.prompt_logprobs = rows
                        else:  # another scheduler's
                            _condense(output.prompt_logprobs)
                        num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
                        yield EnginePart(output=output, num_tokens=num_tokens, is_last=output.finished)
        except (ValueError, TypeError, OverflowError, refused, EngineGenerateError) as error:
            cause = error.__cause__ if isinstance(error, EngineGenerateError) else error
            raise Refusal(f"{type(cause).__name__}: {cause}", code="engine-refused", key="requests") from error

    def _check_prompt_logprobs(self, num_top: int) -> None:
        """Errors: ``Refusal``; vLLM knows ``max_logprobs`` only, and its worker dies of more than there are."""
        size = self.engine.model_config.get_vocab_size()
        if num_top > size:
            problem, remedy = f"{num_top} are above the {size} tokens of the vocabulary", "Ask for fewer."
            raise Refusal(problem, code="engine-refused", key="prompt_logprobs", remedy=remedy)

    async def call(self, method: str, *arguments: object) -> list[dict[str, object]]:
        """Call a method of every worker. Errors: ``WorkerDead``."""
        with _engine_death_as_ours():
            replies: list[dict[str, object]] = await self.engine.collective_rpc(method, args=arguments)
            return replies

    async def pause(self) -> None:
        """Let no request write until ``resume``; those under way stay where they are. Errors: ``WorkerDead``."""
        with _engine_death_as_ours():
            await self.engine.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """End of ``pause``. Errors: ``WorkerDead``."""
        with _engine_death_as_ours():
            await self.engine.resume_generation()

    async def empty_caches(self) -> bool:
        """Forget everything computed with older weights, in a pause; requests under way compute theirs again after it.

        Processed images stay: no weight has made them, and requests between two processes may count on them.
        """
        with _engine_death_as_ours():
            is_empty: bool = await self.engine.reset_prefix_cache(reset_running_requests=True)
            await self.engine.reset_encoder_cache()
        return is_empty

    async def reset_caches(self) -> bool:
        """Forget everything computed with older weights; no request may run.

        Blocks of requests that just ended are given back an engine step later.
        """
        deadline = time.monotonic() + self.reset_limit_s
        with _engine_death_as_ours():
            while not await self.engine.reset_prefix_cache():
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(_RESET_PAUSE_S)  # nothing is generated meanwhile
            await self.engine.reset_encoder_cache()
        return True

    def unfinished_tokens(self) -> dict[str, int]:
        """Response tokens, so far, of the requests under way, by request id. Any thread may ask.

        vLLM hands out whole responses only, but collects their tokens in this process.
        """
        states = list(self.engine.output_processor.request_states.values())
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}

    def is_dead(self) -> bool:
        """Whether a worker of it died."""
        return bool(self.engine.errored)

    def close(self) -> None:
        """Stop its processes. An idle engine core does not end on SIGTERM (vLLM 0.32), and it has nothing to save."""
        reader = self.engine.output_handler
        if reader is not None:  # it would log the end of the engine as an error
            reader.get_loop().call_soon_threadsafe(reader.cancel)
        known = inspect.signature(self.engine.shutdown).parameters
        self.engine.shutdown(**({"timeout": _END_S} if "timeout" in known else {}))
        del self.engine  # else it shuts down once more while Python ends, when half of it is gone


async def _merged(calls: Sequence[AsyncGenerator[EnginePart]], *, is_in_parts: bool) -> AsyncGenerator[EnginePart]:
    """Parts of several calls as they come, or one that holds all; closing ends the calls. Errors: theirs."""
    came: asyncio.Queue[EnginePart | asyncio.Task[None]] = asyncio.Queue()

    async def write(call: AsyncGenerator[EnginePart]) -> None:
        async with aclosing(call):
            async for part in call:
                came.put_nowait(part)

    tasks, whole = list[asyncio.Task[None]](), list[EnginePart]()
    try:
        for call in calls:
            tasks.append(asyncio.create_task(write(call)))
            tasks[-1].add_done_callback(came.put_nowait)
            await asyncio.sleep(0)
        num_left = len(tasks)
        while num_left:
            part = await came.get()
            if isinstance(part, asyncio.Task):
                part.result()
                continue
            num_left -= part.is_last
            if is_in_parts:
                yield replace(part, is_last=not num_left)
            else:
                whole.append(part)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if whole:
        answers = [answer for part in whole for answer in part.output.outputs]
        whole[0].output.outputs = sorted(answers, key=lambda answer: answer.index)
        yield replace(whole[0], num_tokens=sum(part.num_tokens for part in whole))


def dead() -> WorkerDead:
    """What to say when a worker is gone."""
    return WorkerDead("a worker process of this server died", key="worker", remedy="Restart the server, then sync.")


@contextmanager
def _engine_death_as_ours() -> Iterator[None]:
    """vLLM's error as ours."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise dead() from error


def _output_of(output: "RequestOutput", *, num_top: int) -> EngineOutput:
    answer = output.outputs[0]
    token_ids = list(answer.token_ids)
    stopped = answer.finish_reason == "stop"
    stop_token_id = answer.stop_reason if isinstance(answer.stop_reason, int) else token_ids[-1] if stopped else None
    return EngineOutput(
        prompt_token_ids=list(output.prompt_token_ids),
        response_token_ids=token_ids,
        finish_reason="stop" if stopped else "length",
        stop_token_id=stop_token_id,
        logprobs=scheduler.values_of(output, answer),
        runs=scheduler.runs_of(output),
        top=answer.logprobs if num_top else (),
        prompt_logprobs=output.prompt_logprobs,
    )


IMPOSSIBLE = -9999.0
"""Log-probability of a token that top-k or top-p cut off: JSON has no infinity. vLLM's own routes write the same."""


def _condense(logprobs: "FlatLogprobs | None") -> None:
    """Keep numbers in arrays, and each text once: 20 bytes for a token in place of 150."""
    if logprobs is not None:
        logprobs.token_ids = array("i", logprobs.token_ids)
        logprobs.logprobs = array("f", logprobs.logprobs)
        logprobs.ranks = array("i", logprobs.ranks)
        logprobs.decoded_tokens = [text and sys.intern(text) for text in logprobs.decoded_tokens]
