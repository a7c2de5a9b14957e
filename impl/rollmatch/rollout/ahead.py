"""Rollouts of later optimizer steps, asked for while this one is learnt."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    """Optimizer steps since the weights that wrote it -> number of rollouts."""


class Ahead:
    """Keeps windows on their way; learning from them stays in the learner's order.

    ``lead`` windows are asked for in advance, ``max_staleness`` is how many optimizer steps old a rollout may be when
    its window begins; where segments may wait for a row, the lead is smaller. Versions say nothing of age: an
    evaluation and a server that was started again are sent a version of their own. Ranks decide alike without a word:
    what is asked for and what is too old follow from the step, and from which version was sent at which step.
    """

    def __init__(self, prefetch: Prefetch, *, max_staleness: int, lead: int) -> None:
        self.prefetch = prefetch
        self.max_staleness = max_staleness
        self.lead = lead

    def min_version(self, step: int, step_of: Mapping[int, int]) -> int:
        """The oldest version that may be learnt from at ``step``; ``step_of`` tells at which step each was sent.

        >>> Ahead(prefetch=None, max_staleness=1, lead=1).min_version(7, {3: 5, 4: 6, 5: 7, 6: 7})
        4
        """
        return min(version for version, sent_at in step_of.items() if sent_at >= step - self.max_staleness)

    def wait_for_next(self) -> None:
        """Until the next window is there, so that a sync in between leaves it to the weights that began it."""
        if self.prefetch.windows:
            self.prefetch.wait_for(min(self.prefetch.windows))

    def collect(
        self, wanted: Sequence[Wanted], make_requests: MakeRequests, *, step_of: Mapping[int, int]
    ) -> Collected:
        """Ask for the windows that nobody asked for yet, then wait for the first. Errors: as ``Prefetch.collect``."""
        for window in wanted:
            if window.step not in self.prefetch.windows:
                requests = make_requests(window.samples, window.step)
                self.prefetch.ask(window.step, requests, (len(requests),))
        step = wanted[0].step
        rollouts, num_again = self.prefetch.collect(step, min_version=self.min_version(step, step_of))
        ages = Counter(step - step_of[rollout.policy_version] for rollout in rollouts)
        return Collected(rollouts=rollouts, num_asked_again=num_again, staleness=dict(sorted(ages.items())))
