"""The swift dialect: what ms-swift 4.x trainers ask for. Source: ms-swift 4.6 ``pipelines/infer/rollout.py``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from rollmatch.data.ids import PackedIds
from rollmatch.server.generation import GenerateRequest
from rollmatch.server.http import answer, read_body, unless_gone
from rollmatch.server.payloads import InferRequest, Sampling
from rollmatch.server.replica import EngineOutput
from rollmatch.server.sampling import check_count, make_sampling, model_defaults
from rollmatch.server.state import ServerState

_SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)
WHERE = "infer_requests"


class SwiftInferRequest(BaseModel):
    """One prompt; fields that this server has no use for are passed over, as elsewhere."""

    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: PackedIds | None = None
    """Ours: in place of messages."""
    images: list[str | bytes | dict[str, Any]] = []
    uuid: str | None = None


class SwiftRequestConfig(BaseModel):
    """How responses are sampled; None leaves it to the model's generation config."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    n: int = 1
    logprobs: bool = False
    return_details: bool = False


class SwiftBatch(BaseModel):
    """A call of ``/infer/``."""

    infer_requests: list[SwiftInferRequest]
    request_config: SwiftRequestConfig | None = Field(default=None)


def swift_routes(server: ServerState) -> APIRouter:
    """The routes that only this dialect has; its control routes are ``queued_routes``."""
    router = APIRouter(tags=["swift"])
    defaults = model_defaults(server.model.directory)

    @router.post("/infer/")
    async def infer(request: Request) -> Response:
        batch = await read_body(request, SwiftBatch, sampling_at=("request_config",))
        config = batch.request_config or SwiftRequestConfig()
        wishes = generate_requests(batch.infer_requests, config, defaults=defaults)
        await server.queued.before_generating()
        outputs = await unless_gone(request, server.generator.generate(wishes, where=WHERE, clamp=True))
        if isinstance(outputs, Response):
            return outputs
        entries = [
            _entry(server, wish, outputs[place * config.n : (place + 1) * config.n], config)
            for place, wish in enumerate(batch.infer_requests)
        ]
        reply = answer(request, entries)
        reply.headers["x-policy-version"] = str(min((v for _, v in outputs), default=server.pool.policy_version))
        return reply

    @router.post("/get_engine_type/")
    async def engine_type(request: Request) -> Response:
        told = {"engine_type": "AsyncLLMEngine", "enable_multi_turn": False, "use_gym_env": False, "enable_lora": False}
        return answer(request, told)

    @router.get("/get_model_state_keys/")
    async def state_keys(request: Request) -> Response:
        return answer(request, {"keys": list(server.model.tensors)})

    return router


def generate_requests(
    requests: Sequence[SwiftInferRequest], config: SwiftRequestConfig, *, defaults: dict[str, Any]
) -> list[GenerateRequest]:
    """``n`` wishes per request, one after the other; wish i samples from ``seed + i``."""
    count, stop = check_count(config.n), [config.stop] if isinstance(config.stop, str) else config.stop or []
    seed = config.seed or None  # ms-swift reads 0 as unset
    wishes = []
    for item, request in enumerate(requests):
        fields = {name: getattr(config, name) for name in _SAMPLING}
        sampling = _sampling(fields | {"logprobs": config.logprobs}, defaults)
        made = InferRequest(
            request_id=str(item),
            prompt_token_ids=request.prompt_token_ids,
            messages=None if request.messages is None else tuple(request.messages),
            images=tuple(_value_of(image) for image in request.images),
        )
        for copy in range(count):
            number = None if seed is None else seed + item * count + copy
            wishes.append(GenerateRequest(request=made, sampling=sampling, seed=number, stop=tuple(stop)))
    return wishes


def _sampling(fields: dict[str, Any], defaults: dict[str, Any]) -> Sampling:
    """Without ``max_tokens``, a placeholder as long as can be; the prompt's room cuts it."""
    return make_sampling(fields, defaults={"max_tokens": 2**31 - 1} | defaults)


def _value_of(image: str | bytes | dict[str, Any]) -> str | bytes:
    """ms-swift also sends ``{"bytes": ..., "path": ...}``."""
    if isinstance(image, dict):
        value: str | bytes = image.get("bytes") or image.get("path") or ""
        return value
    return image


def _entry(
    server: ServerState,
    request: SwiftInferRequest,
    outputs: Sequence[tuple[EngineOutput, int]],
    config: SwiftRequestConfig,
) -> dict[str, Any]:
    first, version = outputs[0]
    num_prompt, num_response = len(first.prompt_token_ids), sum(len(one.response_token_ids) for one, _ in outputs)
    response = {
        "model": server.model.directory,
        "choices": [_choice(server, one, place, config) for place, (one, _) in enumerate(outputs)],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_response,
            "total_tokens": num_prompt + num_response,
        },
        "id": request.uuid or "",
        "object": "chat.completion",
        "prompt_token_ids": first.prompt_token_ids if config.return_details else None,
    }
    return {
        "response": response,
        "messages": None,
        "response_token_ids": [],
        "response_loss_mask": [],
        "rollout_infos": {"policy_version": version, "uuid": request.uuid},
        "rollout_logprobs": [],
    }


def _choice(server: ServerState, output: EngineOutput, index: int, config: SwiftRequestConfig) -> dict[str, Any]:
    text = server.prompts.decode(output.response_token_ids)
    return {
        "index": index,
        "message": {"role": "assistant", "content": text, "tool_calls": None},
        "finish_reason": output.finish_reason,
        "logprobs": _logprobs(output) if config.logprobs else None,
        "token_ids": output.response_token_ids if config.return_details else None,
    }


def _logprobs(output: EngineOutput) -> dict[str, Any]:
    values = np.frombuffer(output.logprobs or b"", dtype="<f4").tolist()
    pairs = zip(output.response_token_ids, values, strict=True)
    return {"content": [{"token": f"token_id:{token_id}", "logprob": value} for token_id, value in pairs]}
