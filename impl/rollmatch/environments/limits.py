"""What a call of an environment may cost, and what becomes of an episode whose call costs more. Needs no torch."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rollmatch.environments.event_loop import NotDone, run_coroutine
from rollmatch.errors import TargetError

Result = TypeVar("Result")
FAILED_SHARE = "custom.extra.environment.failed_share"
TIMEOUT = "custom.extra.environment.call_timeout_s"
PROCESSES = "custom.extra.environment.processes"


class EpisodeFailed(TargetError):
    """A call of an environment raised, hung, flooded or lost its worker process. It costs its episode only."""

    code = "environment-failed"


class EpisodesFailed(TargetError):
    """More episodes failed than ``failed_share`` allows."""

    code = "episodes-failed"
    is_shared = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentLimits:
    """Where an environment's calls run, for how long, and what they may return."""

    timeout_s: float | None = None
    processes: int = 0
    """Worker processes of this rank; 0: this process."""
    max_observation_bytes: int = 1 << 20
    """UTF-8."""


DEFAULTS = EnvironmentLimits()
Part = tuple[tuple[str, ...], int, int]
"""A rank's first failure, how many there are, and how many episodes."""


def check_observation(observation: str, limits: EnvironmentLimits, *, key: str) -> str:
    """The text itself. Errors: ``EpisodeFailed`` with ``observation-too-long``."""
    if len(observation) > limits.max_observation_bytes or len(observation.encode()) > limits.max_observation_bytes:
        raise EpisodeFailed(
            f"an observation of {len(observation):,} characters, more than {limits.max_observation_bytes:,} bytes",
            code="observation-too-long",
            key=key,
            remedy="Let the environment shorten it, or raise custom.extra.environment.max_observation_bytes.",
        )
    return observation


def timed_out(timeout_s: float | None, *, key: str = "") -> EpisodeFailed:
    """The error of a call that was ended."""
    remedy = f"Make it faster, or raise {TIMEOUT}."
    return EpisodeFailed(f"took more than {timeout_s or 0:g} s", code="environment-timeout", key=key, remedy=remedy)


def run_limited(coroutine: Coroutine[Any, Any, Result], limits: EnvironmentLimits) -> Result:
    """Its result; it is cancelled when its time is over. Errors: ``EpisodeFailed``, what it raises.

    A coroutine that blocks its event loop is given up, and holds the loop until it returns.
    """
    try:
        return run_coroutine(coroutine, timeout_s=None if limits.processes else limits.timeout_s)
    except NotDone as error:
        raise timed_out(limits.timeout_s) from error


def check_share(
    failures: Sequence[str], num: int, *, failed_share: float, gather: Callable[[Part], list[Part]]
) -> None:
    """End the run where too many of all ranks' ``num`` episodes failed. Called by all ranks.

    Errors: ``EpisodesFailed``.

    >>> check_share(["a"], 2, failed_share=0.5, gather=lambda mine: [mine])
    >>> check_share(["[x] data:3: no"], 2, failed_share=0.4, gather=lambda mine: [mine])
    Traceback (most recent call last):
    rollmatch.environments.limits.EpisodesFailed: [episodes-failed] custom.extra.environment.failed_share: 1 of 2 ...
    """
    parts = gather((tuple(failures[:1]), len(failures), num))
    num_failed, num_all = sum(part[1] for part in parts), sum(part[2] for part in parts)
    if num_failed <= failed_share * num_all:
        return
    first = next(failure for part in parts for failure in part[0])
    counted = f"{num_failed} of {num_all} episodes failed, more than a share of {failed_share:g}"
    problem = f"{counted}; the first: {first.rstrip('.')}"
    raise EpisodesFailed(problem, key=FAILED_SHARE, remedy="Correct the environment, or raise the share.")
