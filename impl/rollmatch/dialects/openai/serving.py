"""vLLM's OpenAI classes over a server's engines."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rollmatch.dialects.openai.answers import MISREAD, Endpoint, condensing, model_unknown
from rollmatch.dialects.openai.bodies import ChatMessage
from rollmatch.dialects.openai.engine import PooledEngine
from rollmatch.errors import LaunchError
from rollmatch.server.failures import Refusal
from rollmatch.server.generation import check_count
from rollmatch.server.state import ServerState
from rollmatch.startup import loading


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIServing:
    """vLLM's classes for one server."""

    chat: Endpoint
    completion: Endpoint
    models: Any


def make_serving(server: ServerState) -> OpenAIServing:
    """Errors: ``Refusal`` with ``openai-unavailable``; ``LaunchError`` with ``openai-parser-unknown``."""
    engine = server.pool.replicas[0].engine
    if engine is None:
        raise _unavailable("the server's engines are not vLLM's")
    try:
        with loading():
            from vllm.entrypoints.openai.models.protocol import BaseModelPath
            from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        client = PooledEngine(server, engine)
        paths = [BaseModelPath(name=name, model_path=server.settings.model) for name in names_of(server)]
        return _serving_of(server, client, OpenAIServingModels(client, paths, lora_modules=None))
    except (ImportError, AttributeError) as error:
        raise _unavailable(f"this vLLM's classes are others: {error}") from error


def _serving_of(server: ServerState, client: PooledEngine, models: Any) -> OpenAIServing:
    with loading():
        from vllm import exceptions
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
        from vllm.renderers.online_renderer import OnlineRenderer
    settings, template = server.settings, server.prompts.tokenizer.chat_template
    common: dict[str, Any] = {
        "request_logger": None,
        "chat_template": template if isinstance(template, str) else None,
        "chat_template_content_format": "auto",
        "enable_auto_tools": settings.tool_call_parser is not None,
        "tool_parser": settings.tool_call_parser,
        "reasoning_parser": settings.reasoning_parser or "",
    }
    try:
        renderer = OnlineRenderer(model_config=client.model_config, renderer=client.renderer, **common)
        chat = OpenAIServingChat(client, models, "assistant", online_renderer=renderer, **common)
    except (KeyError, TypeError, ValueError) as error:
        raise _parser_unknown(error) from error
    completion = OpenAIServingCompletion(client, models, online_renderer=renderer, request_logger=None)
    chat._create_chat_logprobs = condensing(chat._create_chat_logprobs)
    completion._create_completion_logprobs = condensing(completion._create_completion_logprobs)
    names = (
        "VLLMClientError",
        "VLLMNotFoundError",
        "GenerationError",
    )  # the last: an engine could not follow a grammar
    misread = (*MISREAD, *(getattr(exceptions, name) for name in names if hasattr(exceptions, name)))
    return OpenAIServing(
        chat=Endpoint(request_type=ChatCompletionRequest, answer=chat.create_chat_completion, misread=misread),
        completion=Endpoint(request_type=CompletionRequest, answer=completion.create_completion, misread=misread),
        models=models,
    )


def names_of(server: ServerState) -> tuple[str, ...]:
    """Under which the server's model may be requested; the first one is what responses say."""
    return tuple(dict.fromkeys((*server.settings.served_model_names, server.settings.model)))


def check_name(server: ServerState, name: str | None) -> None:
    """Errors: ``Refusal`` with ``model-unknown``; None is the server's model."""
    if name is not None and name not in names_of(server):
        raise model_unknown(f"the model {name!r} is not served")


def image_urls(server: ServerState, messages: Iterable[ChatMessage]) -> list[str]:
    """Of all images of a chat, in order. Errors: ``Refusal`` where they are too many."""
    urls = [url for message in messages for url in message.images()]
    check_count(len(urls), "max_images_per_call", server.settings.limits, key="messages.images")
    return urls


def _unavailable(problem: str) -> Refusal:
    remedy = "Install vLLM 0.26 to 0.32, or use the routes of another dialect."
    return Refusal(problem, code="openai-unavailable", key="vllm", remedy=remedy)


def _parser_unknown(error: Exception) -> LaunchError:
    return LaunchError(
        f"vLLM refuses it: {error}",
        code="openai-parser-unknown",
        key="custom.extra.rollout_server.tool_call_parser",
        remedy="Name a parser of vLLM for tool calls (hermes, llama3_json, ...) and for reasoning (qwen3, ...).",
    )
