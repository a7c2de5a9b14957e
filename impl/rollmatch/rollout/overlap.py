"""When the rollouts of a step are generated: before it is learnt, or while another one is.

===================  ===============================================================================
``Lockstep``         rollouts of a step are generated, then learnt from
``Stream``           a step is learnt part by part while its rollouts arrive; strictly on-policy
``Ahead``            rollouts of later windows are generated while the learner learns from this one
``WithoutRollouts``  every response is empty; images of the next window are prepared meanwhile
===================  ===============================================================================
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rollmatch.model.images import ImageFeatures
from rollmatch.records import Rollout, RolloutRequest, Sample
from rollmatch.rollout.prefetch import Prefetch
from rollmatch.rollout.retry import ServerRestarted
from rollmatch.rollout.source import RolloutSource

MakeRequests = Callable[[Sequence[Sample], int], list[RolloutRequest]]
"""(samples, optimizer step) -> their requests, written to the journal."""


class RequestedWindow(NamedTuple):
    """A window to roll out."""

    step: int
    """Its first optimizer step."""
    samples: Sequence[Sample]
    """One entry per rollout."""
    parts: tuple[int, ...] = ()
    """Sizes of the consecutive parts that ``Stream`` yields; empty: one part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPart:
    """Rollouts of a part of a window, in order."""

    rollouts: list[Rollout]
    index: int = 0
    """Of the part, where a window has several."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Optimizer steps since the weights that generated a rollout -> number of rollouts; empty: none."""
    features: dict[int, ImageFeatures] | None = None
    """Of the samples' images, by sample id, where they are known already."""


class Overlap(Protocol):
    """How the rollout phase overlaps with learning."""

    @property
    def source(self) -> RolloutSource:
        """Where rollouts come from."""

    @property
    def prefetch(self) -> Prefetch | None:
        """Calls beside learning; None where nothing is called then."""

    @property
    def lead(self) -> int:
        """Windows that are requested in advance."""

    @property
    def streams(self) -> bool:
        """Whether a step begins to learn before all of its rollouts are there."""

    @property
    def needs_weights(self) -> bool:
        """Whether each step sends its weights to the rollout side."""

    def rollout(self, windows: Sequence[RequestedWindow]) -> Iterator[RolloutPart]:
        """The parts of the first window as they become complete; the ``lead`` windows behind it are requested."""


class Lockstep:
    """Generate, then learn."""

    prefetch, lead, streams, needs_weights = None, 0, False, True

    def __init__(self, source: RolloutSource) -> None:
        self.source = source

    def rollout(self, windows: Sequence[RequestedWindow]) -> Iterator[RolloutPart]:
        """As ``Overlap``: one part."""
        (window,) = windows
        self.source.template.preparation.begin(window.samples)
        yield RolloutPart(rollouts=self.source.roll_out(window.samples, window.step, purpose="train"))


class Stream:
    """Parts of one window in the order in which they become complete."""

    lead, streams, needs_weights = 0, True, True

    def __init__(self, source: RolloutSource, prefetch: Prefetch) -> None:
        self.source, self.prefetch = source, prefetch
        self._step: int | None = None
        self._taken: list[int] = []

    def rollout(self, windows: Sequence[RequestedWindow]) -> Iterator[RolloutPart]:
        """As ``Overlap``. Errors: those of ``Prefetch.collect``."""
        window = windows[0]
        self._step, self._taken = window.step, []
        self.source.template.preparation.begin(window.samples)
        self.prefetch.submit(window.step, self.source.make_requests(window.samples, window.step), window.parts)
        return self._parts(window)

    def has_part(self) -> bool:
        """Whether the next part can be had without waiting, or nothing is left to wait for. Errors: those of calls."""
        return self._step is None or self.prefetch.has_part(self._step, taken=self._taken)

    def is_complete(self) -> bool:
        """Whether all rollouts of the window have arrived."""
        return self._step is None or self.prefetch.is_complete(self._step)

    def wait_for_part(self) -> None:
        """Wait until the next part can be had. Errors: those of the calls, ``ServerRestarted``."""
        if self._step is not None:
            self.prefetch.wait_for_part(self._step, taken=self._taken)

    def _parts(self, window: RequestedWindow) -> Iterator[RolloutPart]:
        while len(self._taken) < len(window.parts):
            index, rollouts = self.prefetch.next_part(window.step, taken=self._taken)
            self._taken.append(index)
            if len(self._taken) == len(window.parts):
                self.prefetch.forget(window.step)
                self._step = None
            yield RolloutPart(index=index, rollouts=rollouts)


class Ahead:
    """Keeps windows under way; learning from them stays in the learner's order.

    ``lead`` windows are requested in advance, ``max_staleness`` is how many optimizer steps old a rollout may be when
    its window begins; where segments may wait for a row, the lead is smaller. A version number is no age: an evaluation
    and a restarted server get a version of their own. Ranks decide alike without communication: what is requested and
    what is too old follow from the step, and from which version was sent at which step.
    """

    streams, needs_weights = False, True

    def __init__(self, source: RolloutSource, prefetch: Prefetch, *, max_staleness: int, lead: int) -> None:
        self.source, self.prefetch = source, prefetch
        self.max_staleness = max_staleness
        self.lead = lead

    def rollout(self, windows: Sequence[RequestedWindow]) -> Iterator[RolloutPart]:
        """As ``Overlap``: one part. Errors: those of ``Prefetch.collect``."""
        source, parts, step = self.source, list[RolloutPart](), windows[0].step
        source.template.preparation.begin(windows[0].samples)

        def attempt() -> int:
            part, num_again = self.collect(windows, source.make_requests, step_of=source.fence.step_of)
            parts[:] = [part]
            return num_again

        again = source.settle(attempt, step=step)
        self.prefetch.forget(step)
        if any(again):
            source.journal.write("asked_again", step=step, num_rollouts=again[source.ranks.rank], by_rank=again)
        yield parts[0]

    def min_version(self, step: int, step_of: Mapping[int, int]) -> int:
        """The oldest version that may be learnt from at ``step``; ``step_of``: version -> the step it was sent at.

        >>> Ahead(None, None, max_staleness=1, lead=1).min_version(7, {3: 5, 4: 6, 5: 7, 6: 7})
        4
        """
        return min(version for version, sent_at in step_of.items() if sent_at >= step - self.max_staleness)

    def wait_for_next(self) -> None:
        """Wait until the next window is complete, so that a sync does not change its weights half-way.

        Where a server was restarted, the window's rest is generated after the sync, by newer weights.
        """
        if self.prefetch.windows:
            with suppress(ServerRestarted):
                self.prefetch.wait_for(min(self.prefetch.windows))

    def collect(
        self, windows: Sequence[RequestedWindow], make_requests: MakeRequests, *, step_of: Mapping[int, int]
    ) -> tuple[RolloutPart, int]:
        """Request the windows that are not under way yet, then wait for the first. Errors: as ``Prefetch.collect``.

        Returns also how many of its rollouts had become too old and were generated again.
        """
        for window in windows:
            if window.step not in self.prefetch.windows:
                requests = make_requests(window.samples, window.step)
                self.prefetch.submit(window.step, requests, (len(requests),))
        step = windows[0].step
        rollouts, num_again = self.prefetch.collect(step, min_version=self.min_version(step, step_of))
        ages = Counter(step - step_of[rollout.policy_version] for rollout in rollouts)
        return RolloutPart(rollouts=rollouts, staleness=dict(sorted(ages.items()))), num_again


class WithoutRollouts:
    """Stage 1: no rollouts. Every response is empty, so the whole true answer is appended to it.

    Weights are sent for evaluations only. The images of the next window are prepared while this one is learnt.
    """

    prefetch, lead, streams, needs_weights = None, 1, False, False

    def __init__(self, source: RolloutSource) -> None:
        self.source = source

    def rollout(self, windows: Sequence[RequestedWindow]) -> Iterator[RolloutPart]:
        """As ``Overlap``: one part, of empty responses."""
        window, template = windows[0], self.source.template
        features = template.preparation.collect(window.samples)
        for coming in windows[1:]:
            template.preparation.begin(coming.samples)
        rollouts = []
        for index, sample in enumerate(window.samples):
            prompt = template.expand(template.prompt_token_ids(sample), features[sample.sample_id])
            rollouts.append(
                Rollout(
                    request_id=f"{window.step}.{self.source.ranks.rank}.{index}",
                    prompt_token_ids=prompt,
                    response_token_ids=(),
                    finish_reason="stop",
                    policy_version=self.source.policy_version,
                )
            )
        yield RolloutPart(rollouts=rollouts, features=features)
