"""The swift dialect, as ms-swift 4.x trainers call it. Source: ms-swift 4.6 ``pipelines/infer/rollout.py``."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from rollmatch.dialects.swift.adapter import adapter_plan
from rollmatch.dialects.swift.bodies import FlatAdapter, SwiftBatch, SwiftImage, SwiftInferRequest, SwiftRequestConfig
from rollmatch.dialects.trl.control_routes import check_places, spec_of_entry
from rollmatch.server.generation import check_count
from rollmatch.server.http import answer, read_body, unless_gone
from rollmatch.server.openapi import accepts
from rollmatch.server.prompts import GenerateRequest
from rollmatch.server.replica import EngineOutput
from rollmatch.server.sampling import LONGEST, make_sampling, model_defaults, seeds_of
from rollmatch.server.state import ServerState

WHERE = "infer_requests"


def swift_routes(server: ServerState) -> APIRouter:
    """The routes that only this dialect has; its control routes are ``control_routes``."""
    router = APIRouter(tags=["swift"])
    defaults = model_defaults(server.model.directory)
    limits = server.settings.limits

    @router.post("/infer/")
    @accepts(SwiftBatch)
    async def infer(request: Request) -> Response:
        longest = {WHERE: limits.max_prompts_per_call}
        batch = await read_body(request, SwiftBatch, sampling_at=("request_config",), longest=longest)
        config = batch.request_config or SwiftRequestConfig()
        check_count(config.n, "max_responses_per_prompt", limits, key="n")
        requests = generate_requests(
            batch.infer_requests, config, defaults=defaults, special_ids=server.prompts.special_ids
        )
        await server.chunked.before_generating()
        outputs = await unless_gone(request, server.generator.generate(requests, where=WHERE, clamp=True))
        if isinstance(outputs, Response):
            return outputs

        def reply() -> Response:
            entries = [
                _entry(server, one, outputs[place * config.n : (place + 1) * config.n], config)
                for place, one in enumerate(batch.infer_requests)
            ]
            return answer(request, entries)

        return server.with_version(await asyncio.to_thread(reply), outputs)

    _add_control(router, server)
    return router


def _add_control(router: APIRouter, server: ServerState) -> None:
    @router.post("/get_engine_type/")
    async def engine_type(request: Request) -> Response:
        about = {
            "engine_type": "AsyncLLMEngine",
            "enable_multi_turn": False,
            "use_gym_env": False,
            "enable_lora": server.settings.enable_lora,
        }
        return answer(request, about)

    @router.post("/update_adapter_flattened_param/")
    @accepts(FlatAdapter)
    async def adapter(request: Request) -> Response:
        body = await read_body(request, FlatAdapter)
        check_places(body.metadatas)
        specs = [spec_of_entry(entry) for entry in body.metadatas]
        await server.chunked.announce_adapter(specs, adapter_plan(body.peft_config, body.metadatas, server.model))
        return answer(request, {"message": f"ready to receive an adapter of {len(specs)} tensors"})

    @router.get("/get_model_state_keys/")
    async def state_keys(request: Request) -> Response:
        return answer(request, {"keys": list(server.model.tensors)})


def generate_requests(
    requests: Sequence[SwiftInferRequest],
    config: SwiftRequestConfig,
    *,
    defaults: Mapping[str, float],
    special_ids: Mapping[str, int],
) -> list[GenerateRequest]:
    """One request per prompt; response i of the call samples from ``seed + i``. Errors: ``Refusal``.

    A text of ``stop`` that is a special token ends a response as that token, as in ms-swift: special tokens are left
    out of the text in which the others are looked for.
    """
    sampling = make_sampling(config.model_dump(), defaults={"max_tokens": LONGEST, **defaults})
    seed = config.seed or None  # ms-swift reads 0 as unset
    named = (config.stop,) if isinstance(config.stop, str) and config.stop else tuple(config.stop or ())
    stop_ids = tuple(special_ids[text] for text in named if text in special_ids)
    sampling = sampling.model_copy(update={"stop_token_ids": sampling.stop_token_ids + stop_ids})
    return [
        GenerateRequest(
            token_ids=request.prompt_token_ids,
            messages=request.messages,
            images=[_value_of(image) for image in request.images],
            sampling=sampling,
            seeds=seeds_of(seed, config.n, item=item),
            stop=tuple(text for text in named if text not in special_ids),
        )
        for item, request in enumerate(requests)
    ]


def _value_of(image: str | bytes | SwiftImage) -> str | bytes:
    return (image.bytes or image.path or "") if isinstance(image, SwiftImage) else image


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
    pairs = zip(output.response_token_ids, output.values())
    return {"content": [{"token": f"token_id:{token_id}", "logprob": value} for token_id, value in pairs]}
