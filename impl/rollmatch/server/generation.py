"""Requests of any dialect and their responses; invalid requests are refused before generation."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rollmatch.config.limits import LimitsConfig
from rollmatch.data.ids import pack_ids
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.failures import Refusal
from rollmatch.server.payloads import InferBatch, InferReply, InferRequest, InferResponse, Sampling
from rollmatch.server.prompts import EnginePrompt, GenerateRequest, PromptMaker, check_room
from rollmatch.server.replica import EngineOutput
from rollmatch.server.structures import StructureCheck

if TYPE_CHECKING:
    from vllm import SamplingParams

_LIMITS = "custom.extra.rollout_server.limits"


class ResponseGenerator:
    """Makes prompts in a thread, beside the event loop, and generates responses."""

    def __init__(self, pool: EnginePool, prompts: PromptMaker, *, max_model_len: int) -> None:
        self.pool, self.prompts, self.max_model_len = pool, prompts, max_model_len
        self.limits = prompts.reader.limits
        self.structures = StructureCheck(prompts.tokenizer, vocabulary_size=prompts.vocabulary_size)
        self._num_logprobs: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        """Task of a call that is being served -> log-probabilities that it may hold."""

    async def infer(self, batch: InferBatch, *, instance: str, call_id: str = "") -> InferReply:
        """The native dialect's call; ``call_id``: as ``EnginePool.generate_all``.

        Errors: ``Refusal``, ``WorkerDead``.
        """
        _check_ids(batch.requests)
        requests = [
            GenerateRequest(
                token_ids=request.prompt_token_ids,
                messages=request.messages,
                images=_images_of(request, batch, item=item),
                sampling=_sampling_of(request, batch, item=item),
                seeds=(request.seed,),
                may_move=True,
            )
            for item, request in enumerate(batch.requests)
        ]
        outputs = await self.generate(requests, call_id=call_id)
        responses = [_response(request, *pair) for request, pair in zip(batch.requests, outputs)]
        return InferReply(instance=instance, policy_version=self.pool.update.policy_version, responses=tuple(responses))

    async def generate(
        self, requests: Sequence[GenerateRequest], *, where: str = "requests", clamp: bool = False, call_id: str = ""
    ) -> list[tuple[EngineOutput, int]]:
        """Every response and its oldest policy version: those of the first request, then of the second, and so on.

        ``clamp`` shortens responses to what fits, as the servers of swift and trl do. Errors: ``Refusal``,
        ``WorkerDead``.
        """
        if not requests:
            return []
        self.pool.check()
        self._check_limits(requests, where)
        for regex in {request.regex for request in requests if request.regex}:
            await self.structures.check({"regex": regex})
        may_download = any(_names_urls(request) for request in requests)
        prepared = await self.prompts.reader.beside(may_download, self._prepare, requests, where, clamp)
        asked = [request.num_prompt_top for request in requests for _ in request.seeds]
        num = sum(prompt.expanded_len * (top + 1) for top, (prompt, _) in zip(asked, prepared) if top is not None)
        self.count_logprobs(num, key="prompt_logprobs")
        try:
            may_move = all(request.may_move for request in requests)
            return await self.pool.generate_all(prepared, call_id=call_id, may_move=may_move)
        except Refusal as error:
            error.item = None if error.item is None else _owner(requests, error.item)
            raise

    def _check_limits(self, requests: Sequence[GenerateRequest], where: str) -> None:
        """Count what the call requests, before anything is read or tokenised."""
        limits = self.limits
        num_responses = sum(len(request.seeds) for request in requests)
        for count, name, key in (
            (max(len(request.seeds) for request in requests), "max_responses_per_prompt", "n"),
            (num_responses, "max_responses_per_call", where),
            (sum(len(request.images) for request in requests), "max_images_per_call", f"{where}.images"),
            (sum(len(request.token_ids or b"") // 4 for request in requests), "max_tokens_per_call", where),
        ):
            check_count(count, name, limits, key=key)
        self.check_waiting(num_responses, key=where)
        num_places = [len(request.seeds) * self.longest(request.sampling.max_tokens) for request in requests]
        num = sum(count * request.num_top for count, request in zip(num_places, requests, strict=True))
        self.count_logprobs(num, key="logprobs")

    def longest(self, max_tokens: int) -> int:
        """Tokens of the longest response that can be asked for so."""
        return min(max_tokens, self.max_model_len)

    def count_logprobs(self, num: int, *, key: str) -> None:
        """Count likeliest tokens' log-probabilities of this task's call, until it has been answered.

        One takes up to 300 bytes. Errors: ``Refusal`` with ``call-too-large`` or ``server-busy``.
        """
        check_count(num, "max_logprobs_per_call", self.limits, key=key)
        task, limit = asyncio.current_task(), self.limits.max_waiting_logprobs
        waiting = sum(count for other, count in self._num_logprobs.items() if not other.done())
        if waiting + num > limit:
            problem = f"{waiting} log-probabilities are waited for, and the call requests {num}"
            raise Refusal(
                problem,
                code="server-busy",
                key=key,
                remedy=f"Try again later, or raise {_LIMITS}.max_waiting_logprobs.",
            )
        if task is not None and num:
            self._num_logprobs[task] = self._num_logprobs.get(task, 0) + num

    def check_waiting(self, num_responses: int, *, key: str) -> None:
        """Raise ``server-busy`` where the queue has no room for so many responses."""
        limits, waiting = self.limits, self.pool.num_running
        if waiting + num_responses > limits.max_waiting_responses:
            problem = f"{waiting} responses are waiting, and the call requests {num_responses}"
            remedy = f"Try again later, or raise {_LIMITS}.max_waiting_responses."
            raise Refusal(problem, code="server-busy", key=key, remedy=remedy)

    def _prepare(
        self, requests: Sequence[GenerateRequest], where: str, clamp: bool
    ) -> list[tuple[EnginePrompt, "SamplingParams"]]:
        """What the engine gets for each response."""
        made: list[tuple[EnginePrompt, SamplingParams]] = []
        budget, num_tokens = self.prompts.reader.budget(), 0
        for item, request in enumerate(requests):
            self.check_length(len(request.token_ids or b"") // 4, item=item, where=where)
            prompt = self.prompts.make(request, budget, item=item, where=where)
            num_tokens += len(prompt.token_ids)
            check_count(num_tokens, "max_tokens_per_call", self.limits, key=where)
            if clamp:
                self.check_length(prompt.expanded_len, item=item, where=where)
                fitting = min(request.sampling.max_tokens, self.max_model_len - prompt.expanded_len)
                request = replace(request, sampling=request.sampling.model_copy(update={"max_tokens": fitting}))
            check_room(prompt, request.sampling.max_tokens, max_model_len=self.max_model_len, item=item)
            self.check_sampled_ids(request.sampling, item=item)
            try:
                made += [(prompt, self.pool.params_of(request, seed=seed)) for seed in request.seeds]
            except Refusal as error:
                error.item = item
                raise
        return made

    def check_length(self, num_tokens: int, *, item: int, where: str) -> None:
        """Raise ``prompt-too-long`` where a prompt leaves no room for a response."""
        if num_tokens >= self.max_model_len:
            problem = f"{num_tokens} prompt tokens leave none for a response in {self.max_model_len}"
            raise Refusal(
                problem, code="prompt-too-long", key=f"{where}[{item}]", remedy="Shorten the prompt.", item=item
            )

    def check_sampled_ids(self, sampling: Sampling, *, item: int | None = None) -> None:
        """Ids outside the vocabulary would be written outside an engine's tensors."""
        size = self.prompts.vocabulary_size
        for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            if ids and max(ids) >= size:
                problem = f"names token {max(ids)}, the vocabulary has {size}"
                remedy = "Use the tokenizer of the served model."
                raise Refusal(problem, code="sampling-value-invalid", key=name, remedy=remedy, item=item)


def check_count(count: int, name: str, limits: LimitsConfig, *, key: str) -> None:
    """Raise ``call-too-large`` where ``count`` is above the limit ``name``."""
    limit: int = getattr(limits, name)
    if count > limit:
        remedy = f"Split the call, or raise {_LIMITS}.{name}."
        raise Refusal(f"{count} is above the limit of {limit}", code="call-too-large", key=key, remedy=remedy)


def _names_urls(request: GenerateRequest) -> bool:
    """Whether images may have to be fetched: those of the call, or of parts of its messages."""
    contents = [message.get("content") for message in request.messages or ()]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    values = [*request.images, *(value for part in parts for value in part.values())]
    values += [inner for value in values if isinstance(value, dict) for inner in value.values()]
    return any(isinstance(value, str) and "://" in value for value in values)


def _owner(requests: Sequence[GenerateRequest], place: int) -> int:
    """The request that the response at ``place`` belongs to."""
    for item, request in enumerate(requests):
        place -= len(request.seeds)
        if place < 0:
            return item
    raise IndexError(place)


def _check_ids(requests: Sequence[InferRequest]) -> None:
    seen: set[str] = set()
    for item, request in enumerate(requests):
        if request.request_id in seen:
            problem, key = f"{request.request_id} names two requests", f"requests[{item}].request_id"
            raise Refusal(problem, code="request-id-repeated", key=key, remedy="Number the requests.", item=item)
        seen.add(request.request_id)


def _images_of(request: InferRequest, batch: InferBatch, *, item: int) -> tuple[str | bytes, ...]:
    """A request's own, and the batch's where it names their places. Errors: ``Refusal``."""
    missing = [value for value in request.images if isinstance(value, int) and value >= len(batch.images)]
    if missing:
        problem, key = f"names image {missing[0]} of {len(batch.images)}", f"requests[{item}].images"
        remedy = "Send each image in images, and name its place, from 0."
        raise Refusal(problem, code="images-misfit", key=key, remedy=remedy, item=item)
    return tuple(batch.images[value] if isinstance(value, int) else value for value in request.images)


def _sampling_of(request: InferRequest, batch: InferBatch, *, item: int) -> Sampling:
    sampling = request.sampling or batch.sampling
    if sampling is None:
        remedy = "Send sampling for the batch or the request."
        raise Refusal("is not given", code="sampling-value-invalid", key="max_tokens", remedy=remedy, item=item)
    return sampling


def _response(request: InferRequest, output: EngineOutput, version: int) -> InferResponse:
    return InferResponse(
        request_id=request.request_id,
        prompt_token_ids=pack_ids(output.prompt_token_ids),
        response_token_ids=pack_ids(output.response_token_ids),
        finish_reason=output.finish_reason,
        stop_token_id=output.stop_token_id,
        policy_version=version,
        policy_versions=output.policy_versions,
        logprobs=output.logprobs,
    )
