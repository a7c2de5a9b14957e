"""Rollouts of later optimizer steps, asked for while this one is learnt."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollmatch.records import Rollout, RolloutRequest, Sample
from rollmatch.rollout.prefetch import Prefetch

MakeRequests = Callable[[Sequence[Sample], int], list[RolloutRequest]]
"""(samples, optimizer step) -> their requests, written down."""


AGE_UNKNOWN = -(2**31)
"""A policy version below all others."""


class Wanted(NamedTuple):
    """A window by its first optimizer step."""

    step: int
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A window's rollouts, in order."""

    rollouts: list[Rollout]
    num_asked_again: int
    """Of them, those that had become too old and were made anew."""
    staleness: dict[int, int]
    """Policy versions that passed since -> number of rollouts."""


class Ahead:
    """Keeps windows on their way; learning from them stays in the learner's order.

    ``lead`` windows are asked for in advance, ``max_staleness`` is how many versions old a rollout may be when it is
    learnt from; where segments may wait for a row, the lead is smaller. Ranks decide alike without a word: what is
    asked for follows from the step, what is too old from the policy version, and both are the same on all of them.
    """

    def __init__(self, prefetch: Prefetch, *, max_staleness: int, lead: int) -> None:
        self.prefetch = prefetch
        self.max_staleness = max_staleness
        self.lead = lead

    def min_version(self, policy_version: int) -> int:
        """The oldest version that may still be learnt from."""
        return policy_version - self.max_staleness

    def wait_for_next(self) -> None:
        """Until the next window is there, so that a sync in between leaves it to the weights that began it."""
        if self.prefetch.windows:
            self.prefetch.wait_for(min(self.prefetch.windows))

    def collect(self, wanted: Sequence[Wanted], make_requests: MakeRequests, *, policy_version: int) -> Collected:
        """Ask for the windows that nobody asked for yet, then wait for the first. Errors: as ``Prefetch.collect``."""
        for window in wanted:
            if window.step not in self.prefetch.windows:
                requests = make_requests(window.samples, window.step)
                self.prefetch.ask(window.step, requests, (len(requests),))
        oldest = self.min_version(policy_version)
        rollouts, num_again = self.prefetch.collect(wanted[0].step, min_version=oldest)
        ages = Counter(policy_version - rollout.policy_version for rollout in rollouts)
        return Collected(rollouts=rollouts, num_asked_again=num_again, staleness=dict(sorted(ages.items())))
