"""What a trainer does to a rollout server, in the order in which it arrives."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.judge.servers.exchange import RecordedCall

Event = dict[str, Any]


class Arrivals:
    """Events, which checks read, and calls as they came, which reports show; of one run of a trainer."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self.events: list[Event] = []
        self.calls: list[RecordedCall] = []

    def note(self, kind: str, **fields: Any) -> Event:
        """Fields may be added to the returned event."""
        event = {"kind": kind} | fields
        with self._turn:
            self.events.append(event)
        return event

    def count(self, kind: str) -> int:
        with self._turn:
            return sum(event["kind"] == kind for event in self.events)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A call for rollouts: a digest of each prompt, and its seeds, one for each request or one for all."""

    prompts: list[str]
    seeds: list[int | None]


def read_generate(path: str, body: Mapping[str, Any]) -> GenerateCall:
    """Errors: ``KeyError``, ``TypeError`` where the body is none of the dialect.

    >>> read_generate("generate", {"prompts": [[5]], "generation_kwargs": {"seed": 3}}).seeds
    [3]
    """
    if path == "native/infer":
        requests = body["requests"]
        return GenerateCall(prompts=[_digest(one) for one in requests], seeds=[one.get("seed") for one in requests])
    if path == "infer":
        prompts, options = body["infer_requests"], body.get("request_config") or {}
    elif path == "generate":
        prompts, options = _with_pictures(body["prompts"], body.get("images")), body.get("generation_kwargs") or {}
    elif path == "v1/completions":
        prompts, options = body["prompt"], body
        prompts = prompts if isinstance(prompts, list) and not _is_one(prompts) else [prompts]
    else:
        prompts, options = [body["messages"]], body
    return GenerateCall(prompts=[_digest(one) for one in prompts], seeds=[options.get("seed")])


def without_last(path: str, reply: Any) -> Any:
    """The reply without its last response.

    >>> without_last("v1/completions", {"choices": [1, 2]})
    {'choices': [1]}
    """
    if path == "infer":
        return reply[:-1]
    name = {"generate": "completion_ids", "native/infer": "responses"}.get(path, "choices")
    rows = (name, "logprobs", "logprob_token_ids")
    return {key: value[:-1] if key in rows and value else value for key, value in reply.items()}


def rounds_of(events: Sequence[Event]) -> list[list[Event]]:
    """Calls for rollouts by the updates before them; the first list is of those before any update."""
    rounds: list[list[Event]] = [[]]
    for event in events:
        if event["kind"] == "update":
            rounds.append([])
        elif event["kind"] == "generate":
            rounds[-1].append(event)
    return rounds


def of_kind(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


def after(events: Sequence[Event], event: Event) -> Iterator[Event]:
    """Those that came later."""
    yield from events[next(place for place, each in enumerate(events) if each is event) + 1 :]


def _is_one(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def _with_pictures(prompts: Sequence[Any], pictures: Any) -> list[Any]:
    return list(zip(prompts, pictures or [None] * len(prompts), strict=True))


def _digest(prompt: Any) -> str:
    """Names and seeds of requests are not part of a prompt."""
    if isinstance(prompt, Mapping):
        prompt = {key: prompt[key] for key in ("messages", "images", "prompt_token_ids") if prompt.get(key)}
    return hashlib.blake2b(json.dumps(prompt, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()
