"""The trl dialect: what TRL up to 1.10 and verifiers 0.1.x ask for. Source: TRL 1.10 ``scripts/vllm_serve.py``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from rollmatch.data.ids import pack_ids
from rollmatch.server.failures import SamplingValueInvalid
from rollmatch.server.generation import GenerateRequest
from rollmatch.server.http import answer, read_body, unless_gone
from rollmatch.server.payloads import InferRequest
from rollmatch.server.replica import EngineOutput
from rollmatch.server.sampling import check_count, make_sampling
from rollmatch.server.state import ServerState

_SAMPLING = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens")
_FURTHER = (
    *("presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "logit_bias", "seed"),
    *("stop", *_SAMPLING),
)
"""What ``generation_kwargs`` may hold."""


class TrlBatch(BaseModel):
    """A call of ``/generate/``; fields that this server has no use for are passed over, as elsewhere."""

    prompts: list[list[int]] | list[str]
    images: list[list[str] | str | None] | None = None
    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | None = 0
    generation_kwargs: dict[str, Any] = {}


def trl_routes(server: ServerState) -> APIRouter:
    """The routes that only this dialect has; its control routes are ``queued_routes``."""
    router = APIRouter(tags=["trl"])

    @router.post("/generate/")
    async def generate(request: Request) -> Response:
        batch = await read_body(request, TrlBatch)
        wishes = generate_requests(batch, server)
        await server.queued.before_generating()
        outputs = await unless_gone(request, server.generator.generate(wishes, where="prompts", clamp=True))
        if isinstance(outputs, Response):
            return outputs
        reply = answer(request, _reply(batch, [one for one, _ in outputs]))
        reply.headers["x-policy-version"] = str(min((v for _, v in outputs), default=server.pool.policy_version))
        return reply

    return router


def generate_requests(batch: TrlBatch, server: ServerState) -> list[GenerateRequest]:
    """``n`` wishes per prompt, one after the other. Errors: ``SamplingValueInvalid``."""
    fields = {name: getattr(batch, name) for name in _SAMPLING} | batch.generation_kwargs
    unknown = sorted(set(batch.generation_kwargs) - set(_FURTHER))
    if unknown:
        raise SamplingValueInvalid("is not known", key=unknown[0], remedy=f"Known are {', '.join(sorted(_FURTHER))}.")
    seed, stop = fields.pop("seed", None), fields.pop("stop", None) or ()
    sampling = make_sampling(fields | {"logprobs": batch.logprobs is not None}, defaults={})
    images = batch.images or [None] * len(batch.prompts)
    count, wishes = check_count(batch.n), []
    texts_or_ids: Sequence[str | list[int]] = batch.prompts
    for item, prompt in enumerate(texts_or_ids):
        token_ids = server.prompts.encode(prompt) if isinstance(prompt, str) else prompt
        told = images[item] if item < len(images) else None
        made = InferRequest(
            request_id=str(item),
            prompt_token_ids=pack_ids(token_ids),
            images=(told,) if isinstance(told, str) else tuple(told or ()),
        )
        for copy in range(count):
            number = None if seed is None else int(seed) + item * count + copy
            stops = (stop,) if isinstance(stop, str) else tuple(stop)
            wishes.append(GenerateRequest(request=made, sampling=sampling, seed=number, stop=stops))
    return wishes


def _reply(batch: TrlBatch, outputs: list[EngineOutput]) -> dict[str, Any]:
    """``prompt_ids`` has a row per prompt, the others one per response."""
    reply: dict[str, Any] = {
        "prompt_ids": [one.prompt_token_ids for one in outputs[:: batch.n]],
        "completion_ids": [one.response_token_ids for one in outputs],
        "logprobs": None,
        "logprob_token_ids": None,
    }
    if batch.logprobs is not None:
        rows = [np.frombuffer(one.logprobs or b"", dtype="<f4").tolist() for one in outputs]
        reply["logprobs"] = [[[value] for value in row] for row in rows]
        reply["logprob_token_ids"] = [[[token_id] for token_id in one.response_token_ids] for one in outputs]
    return reply
