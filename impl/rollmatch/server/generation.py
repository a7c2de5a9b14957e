"""Requests of any dialect to engine requests to responses; invalid requests are refused before generation."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rollmatch.data.ids import pack_ids
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.failures import BadItem, SamplingValueInvalid
from rollmatch.server.payloads import InferBatch, InferReply, InferRequest, InferResponse, Sampling
from rollmatch.server.prompts import PromptMaker, PromptTooLong, check_room
from rollmatch.server.replica import EngineOutput, EngineRequest


class RequestIdRepeated(BadItem):
    """Request ids are unique within a call."""

    code = "request-id-repeated"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One response that somebody asks for, before its prompt was made."""

    request: InferRequest
    sampling: Sampling | None
    """None fills the room that the prompt leaves, greedily."""
    seed: int | None
    stop: tuple[str, ...] = ()


class ResponseGenerator:
    """Makes prompts beside the event loop and generates responses."""

    def __init__(self, pool: EnginePool, prompts: PromptMaker, *, max_model_len: int) -> None:
        self.pool, self.prompts, self.max_model_len = pool, prompts, max_model_len

    async def infer(self, batch: InferBatch, *, instance: str) -> InferReply:
        """The native dialect's call. Errors: those of ``prompts``, ``images`` and ``EnginePool.check``."""
        _check_ids(batch.requests)
        requests = [
            GenerateRequest(request=request, sampling=_sampling_of(request, batch, item=item), seed=request.seed)
            for item, request in enumerate(batch.requests)
        ]
        outputs = await self.generate(requests)
        responses = [_response(request, *pair) for request, pair in zip(batch.requests, outputs, strict=True)]
        return InferReply(instance=instance, policy_version=self.pool.policy_version, responses=tuple(responses))

    async def generate(
        self, requests: Sequence[GenerateRequest], *, where: str = "requests", clamp: bool = False
    ) -> list[tuple[EngineOutput, int]]:
        """Every response with its version, in order. ``clamp`` shortens responses to what fits, as others do."""
        if not requests:
            return []
        self.pool.check()
        engine_requests = await asyncio.to_thread(self._engine_requests, requests, where, clamp)
        return await self.pool.generate_all(engine_requests)

    def _engine_requests(self, requests: Sequence[GenerateRequest], where: str, clamp: bool) -> list[EngineRequest]:
        return [
            self._engine_request(request, item=item, where=where, clamp=clamp) for item, request in enumerate(requests)
        ]

    def _engine_request(self, request: GenerateRequest, *, item: int, where: str, clamp: bool) -> EngineRequest:
        prompt = self.prompts.make(request.request, item=item, where=where)
        room = self.max_model_len - prompt.expanded_len
        sampling = request.sampling
        if clamp:
            if room < 1:
                problem = f"{prompt.expanded_len} prompt tokens leave no room in {self.max_model_len}"
                raise PromptTooLong(problem, key=f"{where}[{item}]", remedy="Shorten the prompt.", item=item)
            sampling = sampling or Sampling(max_tokens=room)
            sampling = sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, room)})
        assert sampling is not None
        check_room(prompt, sampling.max_tokens, max_model_len=self.max_model_len, item=item)
        return EngineRequest(prompt=prompt, sampling=sampling, seed=request.seed, stop=request.stop)


def _check_ids(requests: Sequence[InferRequest]) -> None:
    seen: set[str] = set()
    for item, request in enumerate(requests):
        if request.request_id in seen:
            problem, key = f"{request.request_id} names two requests", f"requests[{item}].request_id"
            raise RequestIdRepeated(problem, key=key, remedy="Number the requests.", item=item)
        seen.add(request.request_id)


def _sampling_of(request: InferRequest, batch: InferBatch, *, item: int) -> Sampling:
    sampling = request.sampling or batch.sampling
    if sampling is None:
        remedy = "Send sampling for the batch or the request."
        raise SamplingValueInvalid("is not given", key="max_tokens", remedy=remedy, item=item)
    return sampling


def _response(request: InferRequest, output: EngineOutput, version: int) -> InferResponse:
    return InferResponse(
        request_id=request.request_id,
        prompt_token_ids=pack_ids(output.prompt_token_ids),
        response_token_ids=pack_ids(output.response_token_ids),
        finish_reason=output.finish_reason,
        stop_token_id=output.stop_token_id,
        policy_version=version,
        logprobs=output.logprobs,
    )
