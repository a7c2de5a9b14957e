"""Generate calls that fail for a while: repeated with back-off, within a budget.

Generation is idempotent, since seeds belong to requests: a call that was repeated gives the rollouts of the first try.
"""

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple, Protocol, TypeVar

from rollmatch.dialects.http import CallTimeout, ServerRefused, TransportFailed
from rollmatch.dialects.prompt import Reply
from rollmatch.dialects.session import InferTimeout, ServerUnreachable
from rollmatch.dialects.watch import CallStalled, ServerDied
from rollmatch.errors import RollmatchError, RolloutError

FIRST_WAIT_S = 0.25
"""Before a call is repeated for the first time; each further wait is twice as long."""
LONGEST_WAIT_S = 8.0
"""Between two attempts of a call."""
BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses of a server that may serve the same call later."""
TRANSIENT = (TransportFailed, CallTimeout, InferTimeout, CallStalled, ServerUnreachable, ServerDied)
SYNC_CODES = frozenset(
    {"transfer-failed", "communicator-timeout", "communicator-missing", "group-port-in-use"}
    | {"sync-not-ready", "sync-dropped", "sync-unconfirmed", "update-in-progress", "version-not-newer"}
    | {"announcement-unknown", "nothing-staged", "weights-broken", "digest-mismatch", "worker-dead"}
)
"""Codes of a sync that a server's death, a broken connection or a wrong byte may have broken."""

Result = TypeVar("Result")


class WaitClock(Protocol):
    """Time as the module ``time`` gives it."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


class ServerRestarted(RolloutError):
    """A server lost its weights between a sync and the end of the calls that follow."""

    code = "server-restarted"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What a generate call may cost, and what its replies may hold. Made by ``run.connect``."""

    retry_budget_s: float = 0.0
    """From the first failure of a call; 0: a failed call is not repeated."""
    num_ids: int | None = None
    """Size of the model's vocabulary; None: not checked."""

    def check(self, reply: Reply, base_url: str, *, max_tokens: int) -> None:
        """Raise ``reply-out-of-range`` for a response that is too long, or holds ids that the model does not have."""
        ids, num_ids = reply.response_token_ids, self.num_ids
        if len(ids) > max_tokens:
            problem = f"{base_url} returned {len(ids)} tokens where at most {max_tokens} were requested"
        elif ids and (min(ids) < 0 or (num_ids is not None and max(ids) >= num_ids)):
            problem = f"{base_url} returned token ids from {min(ids)} to {max(ids)}; the model has {num_ids} ids"
        else:
            return
        raise RolloutError(
            problem, code="reply-out-of-range", key=base_url, remedy="Does the server serve this run's model?"
        )


class Pause(NamedTuple):
    """What comes before the next attempt of a call."""

    attempt: int
    """Number of the next attempt; the first repetition is 2."""
    wait_s: float
    left_s: float
    """Of the budget, when the pause begins."""


def shared_failure(error: RolloutError | None, *, rank: int, problem: str, key: str) -> RolloutError:
    """What a rank raises where ``rank`` has failed: its own ``error`` where it has one. All ranks know of it, so that
    they may save before they end."""
    if error is None:
        error = RolloutError(f"rank {rank}: {problem}", code="rank-failed", key=key, remedy="See that rank's error.")
    error.is_shared = True
    return error


def is_transient(error: RollmatchError) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, ServerRefused):
        return error.status in BUSY or error.code == "update-in-progress"
    return isinstance(error, TRANSIENT)


def is_transient_in_sync(error: RollmatchError) -> bool:
    """Whether a whole new sync may succeed where one failed; not where the servers cannot hold these weights.

    >>> [is_transient_in_sync(RollmatchError("x", code=code)) for code in ("transfer-failed", "tensor-mismatch")]
    [True, False]
    """
    return error.code in SYNC_CODES or is_transient(error)


def call_with_retries(
    call: Callable[[], Result],
    *,
    budget_s: float,
    failed: Callable[[RolloutError, Pause | None], None],
    repeating: Callable[[RolloutError], None] = lambda error: None,
    clock: WaitClock,
) -> Result:
    """The result of ``call``, repeated while it fails transiently and the budget lasts.

    The budget counts from the first failure: a call may have run for minutes by then. ``failed`` is called with every
    error and the pause that follows (None: the error is raised), ``repeating`` after the pause; either may raise
    another error, which ends the call. Errors: the last of ``call``.
    """
    deadline, wait_s, attempt = None, FIRST_WAIT_S, 1
    while True:
        try:
            return call()
        except RolloutError as error:
            now, attempt = clock.monotonic(), attempt + 1
            deadline = now + budget_s if deadline is None else deadline
            if not is_transient(error) or now + wait_s > deadline:
                failed(error, None)
                raise
            failed(error, Pause(attempt, wait_s, deadline - now))
            clock.sleep(wait_s)
            repeating(error)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
