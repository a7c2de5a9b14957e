"""What a sync carries: all weights, or the adapter alone until that fails for the first time."""

import logging
from typing import Any, Literal, Protocol, runtime_checkable

from rollmatch.errors import RollmatchError, SyncError
from rollmatch.rollout.backend import RolloutBackend

LOG = logging.getLogger("rollmatch.sync")
Mode = Literal["full", "adapter"]


class AdapterSyncFailed(SyncError):
    """Without a fallback, every adapter sync must succeed."""

    code = "adapter-sync-failed"


@runtime_checkable
class AdapterTaker(Protocol):
    """A backend that merges adapters on its own side; one that does not gets all weights in every mode."""

    def push_adapter(self, adapter: Any, *, version: int) -> None:
        """As ``push``, for an adapter."""


class SyncMode:
    """Starts as configured and may fall back to full, once and for all.

    Success is what the servers have proven by digests, not a status: a push that returns has been proven.
    """

    def __init__(self, mode: Mode = "full", *, fallback_to_full: bool = True) -> None:
        self.mode: Mode = mode
        self.fallback_to_full = fallback_to_full

    def push(self, backend: RolloutBackend, weights: Any, *, version: int) -> Mode:
        """Returns what was carried. Errors: those of the backend, ``AdapterSyncFailed``."""
        if self.mode == "adapter" and isinstance(backend, AdapterTaker):
            try:
                backend.push_adapter(weights.adapter(), version=version)
            except RollmatchError as error:
                self._fall_back(error)
                version = backend.policy_version + 1  # some server may have taken the version that failed
            else:
                return "adapter"
        backend.push(weights, version=version)
        return "full"

    def _fall_back(self, error: RollmatchError) -> None:
        if not self.fallback_to_full:
            raise AdapterSyncFailed(
                f"{type(error).__name__}: {error}",
                key="custom.extra.rollout_matching.vllm.sync.mode",
                remedy="Set sync.mode: full.",
            ) from error
        self.mode = "full"
        LOG.warning("adapter sync failed; from now on every sync carries all weights: %s", error)
