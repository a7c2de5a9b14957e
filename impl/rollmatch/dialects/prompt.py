"""What goes to a rollout server and what comes back, whatever dialect it speaks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request. Made by ``rollout.vllm_server``, eaten by the dialects."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    """[P'] one placeholder per image."""
    messages: tuple[Mapping[str, Any], ...]
    """The same prompt as a chat, for servers that apply the template themselves."""
    images: tuple[bytes, ...]
    """Encoded pictures (PNG, JPEG, ...), in the order of the placeholders."""
    seed: int
    """Never 0, which ms-swift reads as unset."""
    max_tokens: int | None = None
    """Instead of the call's; dialects without a limit per request may answer with more, which whoever asked cuts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRules:
    """How all responses of one call are sampled."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    stop_token_ids: tuple[int, ...]
    banned_token_ids: tuple[int, ...]
    logprobs: bool = False
    """Whether each sampled token's log-probability is to come back."""
    stop_texts: tuple[str, ...] = ()
    """The stop tokens as texts, for dialects that name them so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One response. Made by the dialects, eaten by ``rollout.vllm_server``."""

    prompt_token_ids: tuple[int, ...]
    """[P] as the engine saw it: image placeholders expanded."""
    response_token_ids: tuple[int, ...]
    """[R] as the server gave it, usually with the stop token."""
    finish_reason: str
    policy_version: int | None
    """None where the dialect does not tell."""
    logprobs: tuple[float, ...] | None = None
    """[R] of each response token, where they were asked for."""
