"""The openai dialect: ``/v1/models``, ``/v1/chat/completions`` and ``/v1/completions``, answered by vLLM's own classes.

Bodies are checked before vLLM reads them; the policy version is written into what it returns. A stream is sent as it is
written: one that a commit does not wait for ends with an error, because its beginning cannot be taken back.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from PIL import Image
from starlette.responses import Response, StreamingResponse

from rollmatch.dialects.openai.answers import CompletionStream, Endpoint, with_versions
from rollmatch.dialects.openai.bodies import ChatBody, CompletionBody, JsonObject, OpenAIBody, text_size
from rollmatch.dialects.openai.engine import CallNotes, notes
from rollmatch.dialects.openai.serving import OpenAIServing, image_urls, make_serving
from rollmatch.server.failures import Refusal
from rollmatch.server.generation import check_count
from rollmatch.server.http import CONTENT_TYPES, answer, check_json, read_body, unless_gone
from rollmatch.server.openapi import accepts
from rollmatch.server.sampling import LONGEST, make_sampling
from rollmatch.server.state import VERSION_HEADER, ServerState


def openai_routes(server: ServerState) -> APIRouter:
    """All routes below ``/v1/``."""
    router = APIRouter(prefix="/v1", tags=["openai"])
    calls = OpenAICalls(server)

    @router.get("/models/")
    async def models(request: Request) -> Response:
        serving = await calls.serving()
        listed: dict[str, Any] = (await serving.models.show_available_models()).model_dump()
        return server.with_version(answer(request, listed), ())

    @router.post("/chat/completions/")
    @accepts(ChatBody, content_types=CONTENT_TYPES[:1])
    async def chat(request: Request) -> Response:
        check_json(request)
        body = await read_body(request, ChatBody)
        urls = image_urls(server, body.messages)
        calls.check(body, [text_size(body.model_dump(exclude_none=True)) - text_size(urls)])
        images = await calls.images_at(urls)
        parts = body.parts(Image.new("RGB", (1, 1)) for _ in images)
        return await calls.serve(request, body, (await calls.serving()).chat, parts=parts, images=images)

    @router.post("/completions/")
    @accepts(CompletionBody, content_types=CONTENT_TYPES[:1])
    async def completions(request: Request) -> Response:
        check_json(request)
        longest = {"prompt": server.settings.limits.max_tokens_per_call}
        body = await read_body(request, CompletionBody, longest=longest)
        prompts = body.prompts()
        num_ids = sum(len(prompt) for prompt in prompts if isinstance(prompt, list))
        check_count(num_ids, "max_tokens_per_call", server.settings.limits, key="prompt")
        calls.check(body, [text_size(prompt) if isinstance(prompt, str) else 0 for prompt in prompts])
        if body.prompt_logprobs is not None:
            longest_text = server.settings.max_model_len
            num_places = sum(len(prompt) if isinstance(prompt, list) else longest_text for prompt in prompts)
            count = num_places * (body.prompt_logprobs + 1) * (body.n or 1)
            server.generator.count_logprobs(count, key="prompt_logprobs")
        return await calls.serve(request, body, (await calls.serving()).completion)

    return router


class OpenAICalls:
    """Calls of one server."""

    def __init__(self, server: ServerState) -> None:
        self.server = server
        parsers = (server.settings.tool_call_parser, server.settings.reasoning_parser)
        self._serving = make_serving(server) if any(parsers) else None  # a wrong name ends the server at its start
        self._lock = asyncio.Lock()

    async def serving(self) -> OpenAIServing:
        """vLLM's classes, imported with the first call. Errors: those of ``make_serving``."""
        async with self._lock:
            if self._serving is None:
                self._serving = await asyncio.to_thread(make_serving, self.server)
        return self._serving

    def check(self, body: OpenAIBody, text_sizes: list[int]) -> None:
        """Count what the call requests, before anything is decoded or tokenised. Errors: ``Refusal``.

        ``text_sizes``: bytes of each prompt.
        """
        limits, n = self.server.settings.limits, body.n or 1
        for count, name, key in (
            (len(text_sizes), "max_prompts_per_call", "prompt"),
            (n, "max_responses_per_prompt", "n"),
            (n * len(text_sizes), "max_responses_per_call", "n"),
        ):
            check_count(count, name, limits, key=key)
        if max(text_sizes, default=0) > limits.max_text_bytes:
            remedy = "Shorten it, or raise custom.extra.rollout_server.limits.max_text_bytes."
            problem = f"a prompt has more than {limits.max_text_bytes} bytes"
            raise Refusal(problem, code="prompt-too-long", key="prompt", remedy=remedy)
        self.server.pool.check()
        self.server.generator.check_waiting(n * len(text_sizes), key="n")
        sampling = make_sampling(body.sampling(), defaults={"max_tokens": body.longest() or LONGEST})
        self.server.generator.check_sampled_ids(sampling)
        num_places = n * len(text_sizes) * self.server.generator.longest(body.longest() or LONGEST)
        self.server.generator.count_logprobs(num_places * body.num_top(), key="logprobs")

    async def images_at(self, urls: list[str]) -> list[Image.Image]:
        """Decoded here: vLLM decodes and downloads none. Errors: ``Refusal``."""
        reader = self.server.prompts.reader
        budget = reader.budget()
        read = [(reader.read, url, f"messages.images[{place}]") for place, url in enumerate(urls)]
        return [
            await reader.beside("://" in url, partial(call, url, budget, item=0, key=key)) for call, url, key in read
        ]

    async def serve(
        self,
        request: Request,
        body: OpenAIBody,
        endpoint: Endpoint,
        *,
        parts: Sequence[list[JsonObject]] = (),
        images: Sequence[Image.Image] = (),
    ) -> Response:
        """The response, or the beginning of a stream, whose headers name the version that it has to its end.

        ``parts``: content of each message of a chat, with others in place of ``images``.
        """
        call, server = CallNotes(images=list(images), is_streamed=bool(body.stream)), self.server
        notes.set(call)
        await server.chunked.before_generating()
        try:
            reply = await unless_gone(request, endpoint.begin(body.for_vllm(), call, parts=parts))
        finally:
            call.images.clear()  # of a call that came to no engine
        if isinstance(reply, Response):
            return reply
        version = {VERSION_HEADER: str(min(call.versions.values()))}
        if isinstance(reply, CompletionStream):
            chunks = reply.chunks(call, body.n or 1)
            return StreamingResponse(chunks, media_type="text/event-stream", headers=version)
        whole = await asyncio.to_thread(answer, request, with_versions(reply, call, body.n or 1))
        whole.headers.update(version)
        return whole
