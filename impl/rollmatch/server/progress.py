"""How long each call has waited for the one of its responses that has stood still for longest."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollmatch.records import rounded


@dataclass(slots=True)
class _OpenResponse:
    """A response that is being written, or waits to be."""

    call_id: str
    replica_index: int
    num_tokens: int = 0
    """Written at the last look; while there is none, below 0 and by those of its whole replica."""
    moved_at: float = field(init=False)
    """Set by the first look, which finds every response moved."""
    idle_s: float = 0.0
    """At the last look: an event loop that does not turn makes no response idle."""


class CallProgress:
    """Responses by the calls that requested them. A call without an id is not followed."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenResponse] = {}

    def begin(self, request_id: str, call_id: str, replica_index: int) -> None:
        """A response is about to be requested from a replica."""
        if call_id:
            self._open[request_id] = _OpenResponse(call_id, replica_index)

    def end(self, request_id: str) -> None:
        """It was written, failed, or is requested again under another id."""
        self._open.pop(request_id, None)

    def look(self, unfinished: Sequence[Mapping[str, int]], finished: Sequence[int]) -> None:
        """Note who has moved. ``unfinished``: tokens of open responses by request id, of each replica; ``finished``:
        tokens that each replica has written in all other responses.

        A response without a token waits for its turn, so it moves while its replica does.
        """
        now = time.monotonic()
        totals = [done + sum(tokens.values()) for done, tokens in zip(finished, unfinished)]
        for request_id, response in list(self._open.items()):
            written = unfinished[response.replica_index].get(request_id, 0)
            waits = response.num_tokens <= 0
            num_tokens = written or (-totals[response.replica_index] - 1 if waits else response.num_tokens)
            if num_tokens != response.num_tokens:
                response.num_tokens, response.moved_at = num_tokens, now
            response.idle_s = now - response.moved_at

    def idle_s(self) -> dict[str, float]:
        """Call id -> seconds for which one of its open responses has not moved, the most. Any thread may ask."""
        idle = dict[str, float]()
        for response in list(self._open.values()):
            idle[response.call_id] = max(idle.get(response.call_id, 0.0), rounded(response.idle_s))
        return idle
