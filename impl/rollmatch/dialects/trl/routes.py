"""The trl dialect: what TRL up to 1.10 and verifiers 0.1.x call. Source: TRL 1.10 ``scripts/vllm_serve.py``."""

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from rollmatch.data.ids import PackedIds
from rollmatch.server.failures import Refusal
from rollmatch.server.generation import check_count
from rollmatch.server.http import answer, read_body, unless_gone
from rollmatch.server.openapi import accepts
from rollmatch.server.payloads import Payload
from rollmatch.server.prompts import GenerateRequest
from rollmatch.server.replica import EngineOutput
from rollmatch.server.sampling import Seed, StopTexts, make_sampling, seeds_of
from rollmatch.server.state import ServerState
from rollmatch.server.unserved import Unserved

_SAMPLING = frozenset(["repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens"])


class TrlGenerationKwargs(Payload):
    """vLLM sampling parameters beside those that are fields of the body; they win over these."""

    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    seed: Seed | None = None
    stop: StopTexts | Annotated[str, Field(min_length=1)] | None = None


class TrlBatch(Payload):
    """A call of ``/generate/``."""

    prompts: list[PackedIds] | list[str]
    images: list[list[str] | str | None] | None = None
    n: int = Field(default=1, ge=1)
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = 0
    generation_kwargs: TrlGenerationKwargs = TrlGenerationKwargs()
    structured_outputs_regex: Unserved = None
    guided_decoding_regex: Unserved = None
    truncate_prompt_tokens: Unserved = None


def trl_routes(server: ServerState) -> APIRouter:
    """The routes that only this dialect has; its control routes are ``control_routes``."""
    router = APIRouter(tags=["trl"])
    limits = server.settings.limits

    @router.post("/generate/")
    @accepts(TrlBatch)
    async def generate(request: Request) -> Response:
        longest = {"prompts": limits.max_prompts_per_call}
        batch = await read_body(request, TrlBatch, sampling_at=("generation_kwargs", "n", "logprobs"), longest=longest)
        check_count(batch.n, "max_responses_per_prompt", limits, key="n")
        requests = generate_requests(batch)
        await server.chunked.before_generating()
        outputs = await unless_gone(request, server.generator.generate(requests, where="prompts", clamp=True))
        if isinstance(outputs, Response):
            return outputs
        return server.with_version(answer(request, _reply(batch, [one for one, _ in outputs])), outputs)

    return router


def generate_requests(batch: TrlBatch) -> list[GenerateRequest]:
    """One request per prompt; response i of the call samples from ``seed + i``. Errors: ``Refusal``."""
    further = batch.generation_kwargs.model_dump(exclude_none=True)
    seed, stop = further.pop("seed", None), further.pop("stop", None) or ()
    fields = batch.model_dump(include=set(_SAMPLING)) | further
    sampling = make_sampling(fields | {"logprobs": batch.logprobs is not None}, defaults={})
    images = batch.images or [None] * len(batch.prompts)
    if len(images) != len(batch.prompts):
        problem = f"{len(images)} entries for {len(batch.prompts)} prompts"
        raise Refusal(problem, code="body-invalid", key="images", remedy="Send one entry (or null) per prompt.")
    requests = []
    for item, (prompt, values) in enumerate(zip(batch.prompts, images, strict=True)):
        request = GenerateRequest(
            token_ids=prompt if isinstance(prompt, bytes) else None,
            text=prompt if isinstance(prompt, str) else None,
            images=(values,) if isinstance(values, str) else tuple(values or ()),
            sampling=sampling,
            seeds=seeds_of(seed, batch.n, item=item),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
        requests.append(request)
    return requests


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
