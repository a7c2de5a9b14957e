"""What vLLM's OpenAI classes take for an engine: all replicas of a server, behind its limits and version fences.

vLLM renders chats and tokenises; it passes images on undecoded, and every check of the other dialects follows.
"""

import asyncio
import copy
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from PIL import Image

from rollmatch.errors import RollmatchError
from rollmatch.server.failures import WorkerDead
from rollmatch.server.generation import check_count
from rollmatch.server.prompts import EnginePrompt
from rollmatch.server.replica import dead
from rollmatch.server.sampling import seeds_of
from rollmatch.server.state import ServerState
from rollmatch.server.structures import KINDS

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.logprobs import LogprobsOnePosition
    from vllm.v1.engine.async_llm import AsyncLLM

_OPTIONS = ("reasoning_ended", "reasoning_parser_kwargs")
"""Keyword arguments of ``generate`` that concern the response; the others are of what is not served."""


_TURNS = 4
"""Of the event loop, in which vLLM's task learns that the responses to the other prompts of its call are whole."""


@dataclass(slots=True)
class CallNotes:
    """What the route learns of its call, past vLLM's classes."""

    versions: dict[int, int] = field(default_factory=dict)
    """Index of a prompt -> policy version of its responses; those that have begun."""
    num_prompts: int = 0
    num_tokens: int = 0
    """Of the prompts that are tokenised."""
    num_written: int = 0
    """Prompts whose responses are whole."""
    is_written: bool = False
    """Whether those of all prompts are, and vLLM's classes have them."""
    is_streamed: bool = False
    error: RollmatchError | None = None
    prompt_logprobs: "dict[int, Iterable[LogprobsOnePosition]]" = field(default_factory=dict)
    """Index of a prompt -> those of its tokens, in place of what vLLM's classes would make of them."""
    images: list[Image.Image] = field(default_factory=list)
    """Of a chat, until its prompt goes to an engine: what vLLM's classes render stays in memory long after the call."""


notes: ContextVar[CallNotes] = ContextVar("notes")
"""Of the call that is being served."""


class PooledEngine:
    """vLLM's ``EngineClient``, as far as the OpenAI classes of vLLM 0.26 and 0.32 use one."""

    def __init__(self, server: ServerState, engine: "AsyncLLM") -> None:
        self._server = server
        self.vllm_config, self.model_config = engine.vllm_config, engine.model_config
        self.input_processor = engine.input_processor
        self.renderer = without_images(engine.renderer)

    @property
    def errored(self) -> bool:
        """Whether a replica is dead."""
        return self._server.pool.is_dead

    @property
    def dead_error(self) -> WorkerDead:
        """What vLLM raises then."""
        return dead()

    async def is_tracing_enabled(self) -> bool:
        """No traces (asked by vLLM 0.26)."""
        return False

    def check_admission(self, *_: object, **__: object) -> None:
        """The route has already checked the queue (asked by vLLM 0.32)."""

    def generate(
        self, prompt: dict[str, Any], sampling_params: "SamplingParams", request_id: str, **options: object
    ) -> AsyncGenerator["RequestOutput"]:
        """Responses to one prompt of the call that is being served. Errors: ``Refusal``."""
        call = notes.get()
        place, call.num_prompts = call.num_prompts, call.num_prompts + 1
        call.num_tokens += len(prompt["prompt_token_ids"])
        images, call.images = call.images, []
        rendered = EnginePrompt(token_ids=prompt["prompt_token_ids"], images=images, expanded_len=0)
        try:
            check_count(call.num_tokens, "max_tokens_per_call", self._server.settings.limits, key="prompt")
            self._server.prompts.check(rendered.token_ids, len(rendered.images), item=place, key=f"prompt[{place}]")
        except RollmatchError as error:
            call.error = error
            raise
        kept = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
        return self._generate(call, place, rendered, sampling_params, kept)

    async def _generate(
        self, call: CallNotes, place: int, rendered: EnginePrompt, params: "SamplingParams", options: dict[str, object]
    ) -> AsyncGenerator["RequestOutput"]:
        server = self._server
        try:
            prompt = await asyncio.to_thread(self._measured, rendered, place)
            wanted = {kind: getattr(params.structured_outputs, kind, None) for kind in KINDS}
            if structure := {kind: value for kind, value in wanted.items() if value is not None}:
                await server.generator.structures.check(structure)
            [params.seed] = seeds_of(params.seed, 1, item=place * params.n)  # vLLM gives each the call's
            params.max_tokens = min(params.max_tokens or 1, server.settings.max_model_len - prompt.expanded_len)
            stream = server.pool.stream(prompt, params, num_responses=params.n, **options)
            async with aclosing(stream) as parts:
                async for part, version in parts:
                    call.versions[place] = version
                    if part.output.prompt_logprobs is not None:
                        call.prompt_logprobs[place], part.output.prompt_logprobs = part.output.prompt_logprobs, None
                    yield part.output
            call.num_written += 1
            if call.num_written == call.num_prompts:
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                call.is_written = True
                await asyncio.sleep(0)
        except RollmatchError as error:
            call.error = error
            raise

    def _measured(self, prompt: EnginePrompt, place: int) -> EnginePrompt:
        """The prompt with its length. Errors: ``Refusal``."""
        key = f"prompt[{place}]"
        measured = self._server.prompts.measure(prompt.token_ids, prompt.images, item=place, key=key)
        self._server.generator.check_length(measured.expanded_len, item=place, where="prompt")
        return measured


def without_images(renderer: Any) -> Any:
    """A copy of vLLM's renderer that stops at token ids, one placeholder per image.

    Its cache of images must see them in the order in which one engine does: so each replica processes its own.
    """

    async def keep(prompt: dict[str, Any], arrival_time: float, **_: object) -> dict[str, Any]:
        return {"type": "token", **prompt}

    stopped = copy.copy(renderer)
    stopped.process_for_engine_async  # noqa: B018  # AttributeError where a vLLM names it otherwise
    stopped.process_for_engine_async = keep
    return stopped
