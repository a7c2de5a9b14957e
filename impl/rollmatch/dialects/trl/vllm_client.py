"""A rollout server of the trl dialect for other trainers: request completions, send new weights.

Usable alone, without the rest of the ring; the names are those that TRL's and verifiers' trainers know. Every training
process may have one and generate; only one of them, the main process, opens the communicator and sends weights.

    client = VLLMClient("http://localhost:8000", group_port=51216)
    completions = client.generate(["What is 2 + 2?"], n=4, max_tokens=32)["completion_ids"]
    client.init_communicator(device="cuda:0")
    client.update_model_params(model)        # sends every weight, then empties the server's prefix cache
    client.close_communicator()
"""

import atexit
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict
from urllib.parse import urlsplit

import torch
from PIL import Image
from torch import Tensor, nn
from transformers.utils import get_json_schema

from rollmatch.config.connection import FIRST_GROUP_PORT, base_url_of
from rollmatch.data.image import as_png
from rollmatch.dialects.http import JSON, ReplyMalformed
from rollmatch.dialects.native.group import Rendezvous, resolve
from rollmatch.dialects.reply import entries_of, field_of, ids_of
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.dialects.swift.client import text_of
from rollmatch.dialects.trl.bodies import TrlSampling
from rollmatch.dialects.trl.client import ROUTE, TrlDialect
from rollmatch.dialects.trl.sender import join, send_named
from rollmatch.dialects.watch import WatchRules, watched
from rollmatch.errors import SyncError
from rollmatch.server.settings import KEY_VARIABLE
from rollmatch.weights.named_weights import named_weights
from rollmatch.weights.nccl import device_of
from rollmatch.weights.plan import spec_of
from rollmatch.weights.stateless import StatelessGroup

_TRANSFER_TIMEOUT_S = 30.0


class SampledCompletions(TypedDict):
    """What ``generate`` and ``chat`` return, as TRL's client does."""

    prompt_ids: list[list[int]] | None
    """One row per prompt; None from a server that returns none (verifiers' fork, TRL before 0.24)."""
    completion_ids: list[list[int]]
    """Prompt by prompt, ``n`` rows each."""
    logprobs: list[list[list[float]]] | None
    """(completion, token, k), likeliest first, the sampled token's among them; None where none were requested."""
    logprob_token_ids: list[list[list[int]]] | None
    """Whose they are."""


class VLLMClient:
    """One server, as one training process sees it."""

    def __init__(
        self,
        base_url: str | None = None,
        host: str = "127.0.0.1",
        server_port: int = 8000,
        group_port: int = FIRST_GROUP_PORT,
        connection_timeout: float = 60.0,
    ) -> None:
        """Wait for the server's health, ``connection_timeout`` seconds at most. Errors: ``ServerUnreachable``.

        ``base_url``, where it is given, stands for host and port.
        The timeout is for connecting and for joining the communicator; the duration of a generate call is not limited,
        a server that dies meanwhile is noticed within seconds. A server with a key gets that of ``ROLLMATCH_API_KEY``.
        """
        key = os.environ.get(KEY_VARIABLE) or None
        settings = ClientSettings(timeout_s=connection_timeout, api_key=key, watch=WatchRules(silence_s=None))
        self.server = RolloutServer(base_url or base_url_of(host, server_port), settings)
        host = urlsplit(base_url).hostname or host if base_url else host
        self.server.connect()
        self.server.dialect = TrlDialect(self.server.base_url)
        self.base_url = self.server.base_url
        self.group_port, self.connection_timeout = group_port, connection_timeout
        self._rendezvous = Rendezvous(
            host=resolve(host),
            port=group_port,
            client="vllm-client",
            timeout_s=_TRANSFER_TIMEOUT_S,
            join_timeout_s=connection_timeout,
        )
        self._group: StatelessGroup | None = None

    def generate(  # noqa: PLR0913  # TRL's signature
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        images: Sequence[Sequence[Image.Image] | None] | None = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, object] | None = None,
    ) -> SampledCompletions:
        """``n`` completions of each prompt; arguments as TRL has them, images one list (or None) per prompt.

        ``generation_kwargs``: seed, stop_token_ids, ... Errors: ``ServerRefused`` with the status, ``ServerDied``,
        ``ReplyMalformed``, ``reply-count-mismatch``; nothing is ever taken for an empty completion.
        """
        given = locals()
        listed = [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        pictures = [[png_of(image) for image in row] if row else None for row in images] if images else None
        return self._sampled(ROUTE, {"prompts": listed, "images": pictures} | sampling_of(given), len(listed))

    def chat(  # noqa: PLR0913  # TRL's signature
        self,
        messages: Sequence[Sequence[Mapping[str, object]]],
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, object] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object] | Callable[..., object]] | None = None,
        chat_template: None = None,
    ) -> SampledCompletions:
        """``n`` completions of each conversation, rendered by the server; ``tools``: JSON schemas or functions.

        The server has the one chat template of its model. Errors: as ``generate``; ``NotImplementedError``.
        """
        given = locals()
        if chat_template is not None:
            raise NotImplementedError("chat_template: the server renders by its model's own; put it into the model.")
        body = {
            "messages": [[with_png(message) for message in conversation] for conversation in messages],
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
            "tools": [get_json_schema(tool) if callable(tool) else tool for tool in tools] if tools else None,
        }
        return self._sampled("/chat", body | sampling_of(given), len(messages))

    def _sampled(self, route: str, body: Mapping[str, Any], num_prompts: int) -> SampledCompletions:
        num_tokens = num_prompts * body["n"] * body["max_tokens"] * (1 + (body["logprobs"] or 0))

        def call() -> object:
            path = self.server.path_of(route)
            return self.server.http.post(path, body, timeout_s=None, content_type=JSON, num_tokens=num_tokens).body

        reply = watched(call, self.server.http, self.server.path_of("/health"), self.server.watch)
        if (completions := self._rows(reply, "completion_ids", num_prompts * body["n"])) is None:
            raise ReplyMalformed(f"the answer of {self.base_url} has no completion_ids", key=self.base_url)
        return {
            "prompt_ids": self._rows(reply, "prompt_ids", num_prompts),
            "completion_ids": completions,
            "logprobs": field_of(reply, "logprobs"),
            "logprob_token_ids": field_of(reply, "logprob_token_ids"),
        }

    def _rows(self, reply: object, name: str, count: int) -> list[list[int]] | None:
        rows = field_of(reply, name)
        if rows is None:
            return None
        entries = entries_of(rows, base_url=self.base_url, num_requests=count)
        return [list(ids_of(row, name=name, place=place, base_url=self.base_url)) for place, row in enumerate(entries)]

    def init_communicator(self, device: torch.device | str | int | None = None) -> None:
        """Join the server's workers as the last rank of their group, by NCCL from a GPU and by gloo from a CPU.

        ``device``: where the weights are; None: this process's GPU, or the CPU where there is none. Errors: the
        server's, ``CommunicatorTimeout``, also where one side has a GPU and the other has none.
        """
        self.close_communicator()
        self._group = join(self.server, self._rendezvous, _with_index(device))
        atexit.register(self.close_communicator)

    def update_named_param(self, name: str, weights: Tensor) -> None:
        """Announce one tensor, then broadcast it.

        Errors: ``communicator-not-open``, ``TransferFailed``, the server's.
        """
        if self._group is None:
            remedy = "Call init_communicator() first, in the main process only."
            raise SyncError("no communicator is open", code="communicator-not-open", key=self.base_url, remedy=remedy)
        send_named(self.server, self._group, spec_of(name, weights), weights)

    def update_model_params(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        """All weights of a model (adapters merged, shards gathered) or of a state dict; then the caches are emptied."""
        named: Iterable[tuple[str, Tensor]] = model.items() if isinstance(model, Mapping) else named_weights(model)
        with torch.no_grad():
            for name, weights in named:
                self.update_named_param(name, weights)
        self.server.empty_caches()

    def reset_prefix_cache(self) -> None:
        """Forget what was computed with older weights."""
        self.server.control("/reset_prefix_cache")

    def close_communicator(self) -> None:
        """Leave the group, if this process is in one."""
        group, self._group = self._group, None
        if group is not None:
            atexit.unregister(self.close_communicator)
            self.server.control("/close_communicator")
            group.close()


def _with_index(device: torch.device | str | int | None) -> torch.device:
    """A device with its index: NCCL wants to know which GPU "cuda" is."""
    found = device_of(()) if device is None else torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a body that both calls have; None leaves a field out, but for ``logprobs``, where it means none.

    >>> sampling_of({"n": 2, "top_p": 0.9, "logprobs": None, "generation_kwargs": {"seed": 7}, "self": 0})
    {'n': 2, 'top_p': 0.9, 'generation_kwargs': {'seed': 7}, 'logprobs': None}
    """
    fields = {name: given[name] for name in TrlSampling.model_fields if given.get(name) is not None}
    return fields | {"logprobs": given.get("logprobs"), "generation_kwargs": dict(given["generation_kwargs"] or {})}


def with_png(message: Mapping[str, object]) -> dict[str, object]:
    """A message whose ``image_pil`` parts hold base64 in place of images.

    >>> with_png({"role": "assistant", "tool_calls": []})
    {'role': 'assistant', 'tool_calls': []}
    """
    content = message.get("content")  # none where a message only calls tools
    if not isinstance(content, list):
        return dict(message)
    parts = [
        part | {"image_pil": png_of(part["image_pil"])} if part.get("type") == "image_pil" else part for part in content
    ]
    return {**message, "content": parts}


def png_of(image: Image.Image) -> str:
    """Base64 of the image as PNG, in RGB: what transformers' processors see of it, and no server reads otherwise."""
    return text_of(as_png(image))
