"""What the judge must know of a dialect: how prompts are sent, and replies read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, Protocol

from conformance.judge.servers.exchange import RecordedCall
from conformance.judge.servers.question import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One response."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float] | None
    text: str | None = None
    finish_reason: str | None = None


class ReplyUnreadable(ValueError):
    """A reply has the form that its dialect gives it."""


def reply_reader(
    read: Callable[[Any, RecordedCall], list[Generated]],
) -> Callable[[Any, RecordedCall], list[Generated]]:
    """``read``, for which a reply of another form is ``ReplyUnreadable``."""

    @wraps(read)
    def guarded(self: Any, call: RecordedCall) -> list[Generated]:
        try:
            return read(self, call)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            problem = f"the reply has another form: {type(error).__name__}: {error}: {call.summary()}"
            raise ReplyUnreadable(problem) from error

    return guarded


class ServerDialect(Protocol):
    """``options`` of ``body``: max_tokens, temperature, seed, n, logprobs, top_k, top_p, min_p, stop.

    One that is not part of the judge: ``dialect_plugins``.
    """

    name: str
    family: str
    """Whose checks are asked: ``native``, ``swift``, ``trl`` or ``vllm``."""
    not_applicable: Mapping[str, str] = MappingProxyType({})
    """Check of the family -> why this protocol has nothing that it could be asked of."""
    transports: tuple[str, ...] = ("gloo",)
    """By which weights reach the workers."""
    file: str = ""
    """A plug-in file that it was read from."""
    health_path: str
    generate_path: str
    signs: frozenset[str]
    """Routes that only its servers have, without a slash at the end."""
    picture_path: str
    """Where a prompt with a picture goes; for ``vllm`` one at a time."""
    incomplete: tuple[str, dict[str, Any], str]
    """Path, body and the name of the field that it lacks."""
    routes: frozenset[str]
    control_paths: tuple[str, ...] = ()
    """Of calls that change weights or stop generation; a POST of ``{}`` to each, one after the other, is harmless."""
    version_of_weights: tuple[str, str] = ("/health/", "policy_version")
    """Route that returns their version, and the name of the field."""
    rests: Mapping[str, Sequence[tuple[str, Any]]]
    """Of the family ``vllm``: what ``checks.pauses`` asks for -> paths and bodies of the calls."""
    quick_call: tuple[str, str]
    """Method and path of a call that changes nothing and may be made at any time, beside generation."""

    def body(self, prompts: Sequence[Question], **options: Any) -> dict[str, Any]: ...

    def spoilt(self, prompts: Sequence[Question]) -> dict[str, Any]:
        """As ``body``, but the last prompt cannot be served."""

    def read(self, call: RecordedCall) -> list[Generated]: ...

    def make_peer(self, talk: Any) -> Any:
        """The learner's side of updates during one ``Talk``, as those in ``senders``."""
        from conformance.judge.servers.senders import PEERS  # loads torch

        return PEERS[self.family](talk)
