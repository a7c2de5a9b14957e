"""What became of one generate call, for the journal: a call may be sent again, and cut in halves."""

from collections.abc import Sequence
from typing import Any

from rollmatch.dialects.prompt import Prompt, Reply


class CallLog:
    """Filled by ``RolloutServer.infer`` on one thread."""

    def __init__(self) -> None:
        self.num_retries = 0
        self.num_splits = 0
        self.sent: list[dict[str, Any]] = []
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

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        told = {"num_retries": self.num_retries, "num_splits": self.num_splits, "sent": self.sent}
        return told | {"policy_versions": self.policy_versions}
