"""What goes to a rollout server and what comes back, whatever dialect it speaks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request. Made by ``rollout.servers``, used by the dialects."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    """[P'] one placeholder per image."""
    messages: tuple[Mapping[str, object], ...]
    """The same prompt as a chat, for servers that apply the template themselves."""
    images: tuple[bytes, ...]
    """Encoded pictures (PNG, JPEG, ...), in the order of the placeholders."""
    seed: int
    """Never 0, which ms-swift reads as unset."""
    max_tokens: int | None = None
    """Instead of the call's; dialects without a limit per request may answer with more, which the caller cuts."""
    template_values: Mapping[str, object] = field(default_factory=dict)
    """Further variables of the chat template, for ``messages``."""


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
    logprobs: bool
    """Whether each sampled token's log-probability is to come back."""
    stop_texts: tuple[str, ...] = ()
    """The stop tokens as texts, for dialects that name them so."""

    def values(self) -> dict[str, object]:
        """Those that all dialects spell alike, as fields of a body."""
        names = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty")
        return {name: getattr(self, name) for name in names}


UNSHAPED = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Values that no run sets. They are sent, because servers would take them from ``generation_config.json``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One response. Made by the dialects, used by ``rollout.servers``."""

    prompt_token_ids: tuple[int, ...]
    """[P] as the engine saw it: image placeholders expanded."""
    response_token_ids: tuple[int, ...]
    """[R] as the server gave it, usually with the stop token."""
    finish_reason: str
    policy_version: int | None
    """The oldest that wrote in it; None where the dialect has no version."""
    policy_versions: tuple[tuple[int, int], ...] = ()
    """Runs of (version, number of response tokens that it wrote), in order; empty where the server names none."""
    logprobs: tuple[float, ...] | None = None
    """[R] of each response token, where they were requested."""


class CallLog:
    """How one generate call was carried out, for the journal; filled by ``RolloutServer.infer`` on one thread."""

    def __init__(self) -> None:
        self.num_retries = 0
        self.num_splits = 0
        self.sent: list[dict[str, object]] = []
        """Each call that was sent and is not just a repetition: first request, their number, their seeds."""
        self.policy_versions: list[int] = []
        """Those that the replies named, where they did."""

    def note(self, prompts: Sequence[Prompt], *, start: int) -> None:
        """A call is about to be sent; ``start`` is its first prompt's index in the whole list."""
        seeds = [prompt.seed for prompt in prompts]
        self.sent.append({"first": start, "num_requests": len(prompts), "seeds": seeds})

    def note_replies(self, replies: Sequence[Reply]) -> None:
        """They have come."""
        self.policy_versions = sorted({r.policy_version for r in replies if r.policy_version is not None})

    def as_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "num_retries": self.num_retries,
            "num_splits": self.num_splits,
            "sent": self.sent,
            "policy_versions": self.policy_versions,
        }
