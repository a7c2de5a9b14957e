"""The trl dialect: what TRL up to 1.10 and verifiers 0.1.x call. Source: TRL 1.10 ``scripts/vllm_serve.py``."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from rollmatch.dialects.trl.bodies import TrlBatch, TrlChats, TrlSampling
from rollmatch.server.failures import Refusal
from rollmatch.server.generation import check_count
from rollmatch.server.http import answer, read_body, unless_gone, written
from rollmatch.server.openapi import accepts
from rollmatch.server.payloads import Sampling
from rollmatch.server.prompts import GenerateRequest
from rollmatch.server.replica import EngineOutput
from rollmatch.server.sampling import make_sampling, seeds_of
from rollmatch.server.state import ServerState

_SAMPLING_AT = ("generation_kwargs", "n", "logprobs")


_Call = TypeVar("_Call", bound=TrlSampling)


def trl_routes(server: ServerState) -> APIRouter:
    """The routes that only this dialect has; its control routes are ``control_routes``."""
    router = APIRouter(tags=["trl"])
    limits = server.settings.limits

    async def serve(
        request: Request, call: _Call, make: Callable[[_Call], list[GenerateRequest]], where: str
    ) -> Response:
        check_count(call.n, "max_responses_per_prompt", limits, key="n")
        requests = make(call)  # with a seed for each response
        await server.chunked.before_generating()
        outputs = await unless_gone(request, server.generator.generate(requests, where=where, clamp=True))
        if isinstance(outputs, Response):
            return outputs
        reply = await asyncio.to_thread(lambda: answer(request, _reply(request, call, [one for one, _ in outputs])))
        return server.with_version(reply, outputs)

    @router.post("/generate/")
    @accepts(TrlBatch)
    async def generate(request: Request) -> Response:
        longest = {"prompts": limits.max_prompts_per_call}
        batch = await read_body(request, TrlBatch, sampling_at=_SAMPLING_AT, longest=longest)
        return await serve(request, batch, generate_requests, "prompts")

    @router.post("/chat/")
    @accepts(TrlChats)
    async def chat(request: Request) -> Response:
        longest = {"messages": limits.max_prompts_per_call}
        chats = await read_body(request, TrlChats, sampling_at=_SAMPLING_AT, longest=longest)
        return await serve(request, chats, chat_requests, "messages")

    return router


def generate_requests(batch: TrlBatch) -> list[GenerateRequest]:
    """One request per prompt; response i of the call samples from ``seed + i``. Errors: ``Refusal``."""
    images = batch.images or [None] * len(batch.prompts)
    if len(images) != len(batch.prompts):
        problem = f"{len(images)} entries for {len(batch.prompts)} prompts"
        raise Refusal(problem, code="images-misfit", key="images", remedy="Send one entry (or null) per prompt.")
    common = _common(batch)
    return [
        GenerateRequest(
            token_ids=prompt if isinstance(prompt, bytes) else None,
            text=prompt if isinstance(prompt, str) else None,
            images=(values,) if isinstance(values, str) else tuple(values or ()),
            may_be_expanded=True,
            **common(item),
        )
        for item, (prompt, values) in enumerate(zip(batch.prompts, images))
    ]


def chat_requests(chats: TrlChats) -> list[GenerateRequest]:
    """One request per conversation, as ``generate_requests``. Errors: ``Refusal``."""
    common = _common(chats)
    return [
        GenerateRequest(
            messages=messages, tools=chats.tools or (), template_values=chats.chat_template_kwargs, **common(item)
        )
        for item, messages in enumerate(chats.messages)
    ]


def _common(call: TrlSampling) -> Callable[[int], dict[str, Any]]:
    """Place of a prompt -> the fields of its request that do not depend on its kind. Errors: ``Refusal``."""
    further = call.generation_kwargs.model_dump(exclude_none=True)
    seed, stop = further.pop("seed", None), further.pop("stop", None) or ()
    fields = call.model_dump(include=set(Sampling.model_fields)) | further
    sampling = make_sampling(fields | {"logprobs": call.logprobs is not None}, defaults={})

    def of(item: int) -> dict[str, Any]:
        return {
            "sampling": sampling,
            "seeds": seeds_of(seed, call.n, item=item),
            "stop": (stop,) if isinstance(stop, str) else tuple(stop),
            "regex": call.structured_outputs_regex,
            "num_top": call.logprobs or 0,
        }

    return of


def _reply(request: Request, call: TrlSampling, outputs: list[EngineOutput]) -> dict[str, Any]:
    """``prompt_ids`` has a row per prompt, the others one per response; log-probabilities: (response, token, k)."""
    reply: dict[str, Any] = {
        "prompt_ids": [one.prompt_token_ids for one in outputs[:: call.n]],
        "completion_ids": [one.response_token_ids for one in outputs],
        "logprobs": None,
        "logprob_token_ids": None,
    }
    if call.logprobs is not None:
        rows = [_written(request, one) for one in outputs]
        reply["logprob_token_ids"] = [token_ids for token_ids, _ in rows]
        reply["logprobs"] = [values for _, values in rows]
    return reply


def _written(request: Request, output: EngineOutput) -> tuple[msgspec.Raw, msgspec.Raw]:
    """Ids, and log-probabilities, of the likeliest at each token of a response."""
    places = [tuple(zip(*place, strict=True)) for place in output.likeliest()]
    return written(request, [ids for ids, _ in places]), written(request, [values for _, values in places])
