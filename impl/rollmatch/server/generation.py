"""Requests of any dialect -> draws -> responses. What cannot be served is refused before anything is generated."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rollmatch.data.ids import pack_ids
from rollmatch.server.failures import BadItem, SamplingValueInvalid
from rollmatch.server.front import Front
from rollmatch.server.payloads import InferBatch, InferReply, InferRequest, InferResponse, Sampling
from rollmatch.server.prompts import PromptMaker, PromptTooLong, check_room
from rollmatch.server.replica import Draw, Drawn


class RequestIdRepeated(BadItem):
    """Request ids are unique within a call."""

    code = "request-id-repeated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One response that somebody asks for, before its prompt was made."""

    request: InferRequest
    sampling: Sampling | None
    """None fills the room that the prompt leaves, greedily."""
    seed: int | None
    stop: tuple[str, ...] = ()


class Generation:
    """Makes prompts beside the event loop and draws responses."""

    def __init__(self, front: Front, prompts: PromptMaker, *, max_model_len: int) -> None:
        self.front, self.prompts, self.max_model_len = front, prompts, max_model_len

    async def infer(self, batch: InferBatch, *, instance: str) -> InferReply:
        """The native dialect's call. Errors: those of ``prompts``, ``images`` and ``Front.check``."""
        _check_ids(batch.requests)
        wishes = [
            Wish(request=request, sampling=_sampling_of(request, batch, item=item), seed=request.seed)
            for item, request in enumerate(batch.requests)
        ]
        drawn = await self.draw(wishes)
        responses = [_response(request, *pair) for request, pair in zip(batch.requests, drawn, strict=True)]
        return InferReply(instance=instance, policy_version=self.front.policy_version, responses=tuple(responses))

    async def draw(
        self, wishes: Sequence[Wish], *, where: str = "requests", clamp: bool = False
    ) -> list[tuple[Drawn, int]]:
        """Every response with its version, in order. ``clamp`` shortens responses to what fits, as others do."""
        if not wishes:
            return []
        self.front.check()
        draws = await asyncio.to_thread(self._make_draws, wishes, where, clamp)
        return await self.front.draw_all(draws)

    def _make_draws(self, wishes: Sequence[Wish], where: str, clamp: bool) -> list[Draw]:
        return [self._make_draw(wish, item=item, where=where, clamp=clamp) for item, wish in enumerate(wishes)]

    def _make_draw(self, wish: Wish, *, item: int, where: str, clamp: bool) -> Draw:
        prompt = self.prompts.make(wish.request, item=item, where=where)
        room = self.max_model_len - prompt.expanded_len
        sampling = wish.sampling
        if clamp:
            if room < 1:
                problem = f"{prompt.expanded_len} prompt tokens leave no room in {self.max_model_len}"
                raise PromptTooLong(problem, key=f"{where}[{item}]", remedy="Shorten the prompt.", item=item)
            sampling = sampling or Sampling(max_tokens=room)
            sampling = sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, room)})
        assert sampling is not None
        check_room(prompt, sampling.max_tokens, max_model_len=self.max_model_len, item=item)
        return Draw(prompt=prompt, sampling=sampling, seed=wish.seed, stop=wish.stop)


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


def _response(request: InferRequest, drawn: Drawn, version: int) -> InferResponse:
    return InferResponse(
        request_id=request.request_id,
        prompt_token_ids=pack_ids(drawn.prompt_token_ids),
        response_token_ids=pack_ids(drawn.response_token_ids),
        finish_reason=drawn.finish_reason,
        stop_token_id=drawn.stop_token_id,
        policy_version=version,
        logprobs=drawn.logprobs,
    )
