"""``/inference/v1/generate``: token ids in, token ids out, as ``TrainClient`` of verifiers' v1 API calls it.

TRL 1.11 and newer send images to ``/v1/chat/completions/render`` first, and what that returns with the ids.

vLLM's own route changes its form from version to version; this one is ours. A log-probability stands beside the id in
both forms that clients read, ``token_id`` and ``token`` ("token_id:7"). Sources: renderers 0.1.12 ``client.py``, vLLM
0.32 ``entrypoints/scale_out/token_in_token_out/protocol.py``.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby

from fastapi import APIRouter, Request
from starlette.responses import Response

from rollmatch.dialects.openai.answers import prompt_places
from rollmatch.dialects.openai.bodies import DetokenizeBody, RenderBody, TokenBody
from rollmatch.dialects.openai.serving import check_name, image_urls, names_of
from rollmatch.server.failures import Refusal
from rollmatch.server.generation import check_count
from rollmatch.server.http import CONTENT_TYPES, answer, check_json, read_body, unless_gone, written
from rollmatch.server.openapi import accepts
from rollmatch.server.payloads import Sampling
from rollmatch.server.prompts import GenerateRequest
from rollmatch.server.replica import EngineOutput
from rollmatch.server.sampling import LONGEST, make_sampling, seeds_of
from rollmatch.server.state import ServerState


def token_routes(server: ServerState) -> APIRouter:
    """Routes of token ids."""
    router = APIRouter(tags=["openai"])

    @router.post("/inference/v1/generate/")
    @accepts(TokenBody, content_types=CONTENT_TYPES[:1])
    async def generate(request: Request) -> Response:
        check_json(request)
        body = await read_body(request, TokenBody, sampling_at=("sampling_params",))
        check_name(server, body.model)
        check_count(body.sampling_params.n, "max_responses_per_prompt", server.settings.limits, key="n")
        asked = token_request(body)
        await server.chunked.before_generating()
        outputs = await unless_gone(request, server.generator.generate([asked], where="token_ids", clamp=True))
        if isinstance(outputs, Response):
            return outputs
        fields = await asyncio.to_thread(_reply, request, body, outputs, server=server)
        if body.return_token_ids:
            fields |= _prompt_of(body, outputs[0][0], server.prompts.image_id)
        return server.with_version(await asyncio.to_thread(answer, request, fields), outputs)

    @router.post("/v1/chat/completions/render/")
    @accepts(RenderBody, content_types=CONTENT_TYPES[:1])
    async def render(request: Request) -> Response:
        check_json(request)
        body = await read_body(request, RenderBody)
        check_name(server, body.model)
        urls = image_urls(server, body.messages)
        reader = server.prompts.reader
        return answer(request, await reader.beside(any("://" in url for url in urls), _rendered, server, body, urls))

    @router.post("/detokenize/")
    @accepts(DetokenizeBody, content_types=CONTENT_TYPES[:1])
    async def detokenize(request: Request) -> Response:
        check_json(request)
        body = await read_body(request, DetokenizeBody, longest={"tokens": server.settings.limits.max_tokens_per_call})
        check_name(server, body.model)
        check_count(len(body.tokens), "max_tokens_per_call", server.settings.limits, key="tokens")
        text = await asyncio.to_thread(server.prompts.tokenizer.decode, body.tokens)
        return answer(request, {"prompt": text})

    return router


def _rendered(server: ServerState, body: RenderBody, urls: Sequence[str]) -> dict[str, object]:
    """The prompt, and its images in a form that ``/inference/v1/generate`` takes again. Errors: ``Refusal``."""
    prompts = server.prompts
    asked = GenerateRequest(
        messages=[message.model_dump(exclude_none=True) for message in body.messages],
        tools=body.tools or (),
        template_values=body.chat_template_kwargs or {},
        sampling=Sampling(max_tokens=1),
    )
    token_ids = prompts.make(asked, prompts.reader.budget(), item=0, where="messages").token_ids
    places = [place for place, token_id in enumerate(token_ids) if token_id == prompts.placeholder_id]
    features = {
        "mm_hashes": {"image": [blake2b(url.encode(), digest_size=16).hexdigest() for url in urls]},
        "mm_placeholders": {"image": [{"offset": place, "length": 1} for place in places]},
        "kwargs_data": {"image": list(urls)},
    }
    return {"token_ids": token_ids, "features": features if urls else None}


def token_request(body: TokenBody) -> GenerateRequest:
    """The call's prompt; response i samples from ``seed + i``. Errors: ``Refusal``."""
    given, stop = body.sampling_params, body.sampling_params.stop or ()
    fields = given.model_dump(exclude={"structured_outputs"}) | {"logprobs": given.logprobs is not None}
    return GenerateRequest(
        token_ids=body.token_ids,
        images=body.images(),
        may_be_expanded=body.features is not None,
        sampling=make_sampling(fields, defaults={"temperature": 1.0, "max_tokens": LONGEST}),
        seeds=seeds_of(given.seed, given.n),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        regex=given.structured_outputs.regex if given.structured_outputs else None,
        num_top=given.logprobs or 0,
        num_prompt_top=given.prompt_logprobs,
    )


def _reply(
    request: Request, body: TokenBody, outputs: Sequence[tuple[EngineOutput, int]], *, server: ServerState
) -> dict[str, object]:
    num_prompt = len(outputs[0][0].prompt_token_ids)
    num_written = sum(len(output.response_token_ids) for output, _ in outputs)
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_written, "total_tokens": num_prompt + num_written}
    return {
        "request_id": body.request_id or uuid.uuid4().hex,
        "model": names_of(server)[0],
        "created": int(time.time()),
        "choices": [
            _choice(place, *pair, version_name=server.update.name_of(pair[1]))
            | {"logprobs": None if pair[0].logprobs is None else written(request, {"content": _logprobs_of(pair[0])})}
            for place, pair in enumerate(outputs)
        ],
        "prompt_logprobs": prompt_places(outputs[0][0].prompt_logprobs),
        "usage": usage,
        "policy_version": min(version for _, version in outputs),
    }


def _choice(place: int, output: EngineOutput, version: int, *, version_name: str) -> dict[str, object]:
    return {
        "index": place,
        "token_ids": output.response_token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_token_id,
        "policy_version": version,
        "weight_versions": [{"start": 0, "end": len(output.response_token_ids), "version": version_name}],
    }


def _logprobs_of(output: EngineOutput) -> list[dict[str, object]]:
    return [
        _entry(token_id, value) | {"top_logprobs": [_entry(*pair) for pair in likeliest] if output.top else []}
        for token_id, value, likeliest in zip(output.response_token_ids, output.values(), output.likeliest())
    ]


def _entry(token_id: int, value: float) -> dict[str, object]:
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": value, "bytes": None}


def _prompt_of(body: TokenBody, output: EngineOutput, image_id: int | None) -> dict[str, object]:
    """The expanded prompt, and where its images are. Errors: ``Refusal`` where they follow each other directly."""
    found, place = [], 0
    for is_image, run in groupby(output.prompt_token_ids, lambda token_id: token_id == image_id):
        length = len(list(run))
        found += [{"offset": place, "length": length}] * is_image
        place += length
    if len(found) != len(body.images()):
        problem = f"the expanded prompt has {len(found)} runs of placeholders for {len(body.images())} images"
        remedy = "Leave return_token_ids out, or use /v1/chat/completions with this model."
        raise Refusal(problem, code="images-misfit", key="content_parts", remedy=remedy)
    return {"prompt_token_ids": output.prompt_token_ids, "mm_placeholders": {"image": found} if found else {}}
