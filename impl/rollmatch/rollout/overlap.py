"""When the rollouts of a step are generated: before it is learnt, or while another one is.

===================  ===============================================================================
``Lockstep``         rollouts of a step are generated, then learnt from
``Mixed``            the same, with answers of the data set in some steps
``Ahead``            rollouts of later windows are generated while the learner learns from this one
``FirstComplete``    the same with episodes; a step takes the groups of any of these windows that are complete
``WithoutRollouts``  every response is empty; images of the next window are prepared meanwhile
===================  ===============================================================================
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from rollmatch.errors import RolloutError
from rollmatch.model.images import ImageFeatures
from rollmatch.records import Rollout, RolloutRequest, Sample
from rollmatch.rollout.early import EarlyWork, Work
from rollmatch.rollout.episodes import EpisodeServers, InFlight
from rollmatch.rollout.open_groups import Group, OpenGroups
from rollmatch.rollout.prefetch import Prefetch
from rollmatch.rollout.prefetch_rules import PrefetchRules, ServerBackend
from rollmatch.rollout.retry import ServerRestarted
from rollmatch.rollout.source import RolloutSource

MakeRequests = Callable[[Sequence[Sample], int], list[RolloutRequest]]
"""(samples, optimizer step) -> their requests, written to the journal."""
AnswerOf = Callable[[Sample], tuple[int, ...]]
"""A sample's own answer, without a stop token."""


class RequestedWindow(NamedTuple):
    """A window to roll out."""

    step: int
    """Its first optimizer step."""
    samples: Sequence[Sample]
    """One entry per rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedWindow:
    """The rollouts of a window, in order."""

    rollouts: list[Rollout]
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Optimizer steps since the weights that generated a rollout -> number of rollouts; empty: none."""
    features: dict[int, ImageFeatures] | None = None
    """Of the samples' images, by sample id, where they are known already."""
    samples: Sequence[Sample] | None = None
    """What was rolled out, one entry per group, where that is not the window's own."""
    is_given: bool = False
    """The data set's own answers stand in place of rollouts: nothing was generated."""
    early: Any = None
    """What ``EarlyWork`` made of it; None: nothing."""


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
    def needs_weights(self) -> bool:
        """Whether each step sends its weights to the rollout side."""

    def rollout(self, windows: Sequence[RequestedWindow]) -> GeneratedWindow:
        """The rollouts of the first window; the ``lead`` windows behind it are requested."""


class Lockstep:
    """Generate, then learn."""

    prefetch, lead, needs_weights = None, 0, True

    def __init__(self, source: RolloutSource) -> None:
        self.source = source

    def rollout(self, windows: Sequence[RequestedWindow]) -> GeneratedWindow:
        """As ``Overlap``."""
        (window,) = windows
        self.source.template.preparation.begin(window.samples)
        return GeneratedWindow(rollouts=self.source.roll_out(window.samples, window.step, purpose="train"))


class Mixed(Lockstep):
    """As ``Lockstep``, but the data set's own answers in place of the rollouts of some windows (GKD's ``lmbda``)."""

    def __init__(self, source: RolloutSource, *, share: float, answer_of: AnswerOf) -> None:
        super().__init__(source)
        self.share, self.answer_of = share, answer_of

    def rollout(self, windows: Sequence[RequestedWindow]) -> GeneratedWindow:
        """As ``Overlap``; all ranks, and a run that is resumed, generate at the same steps."""
        window, template = windows[0], self.source.template
        if np.random.default_rng([self.source.run_seed, window.step, 2]).random() < self.share:
            return super().rollout(windows)
        template.preparation.begin(window.samples)
        features = template.preparation.collect(window.samples)
        rollouts = given_rollouts(self.source, window, features, self.answer_of)
        return GeneratedWindow(rollouts=rollouts, features=features, is_given=True)


class Ahead:
    """Keeps windows under way; learning from them stays in the learner's order.

    ``lead`` windows are requested in advance, ``max_staleness`` is how many optimizer steps old a rollout may be when
    its window begins; where segments may wait for a row, the lead is smaller. A version number is no age: an evaluation
    and a restarted server get a version of their own. Ranks decide alike without communication: what is requested and
    what is too old follow from the step, and from which version was sent at which step.
    """

    needs_weights = True

    early: EarlyWork | None = None
    """Where targets need the weights that wrote the rollouts."""

    def __init__(
        self, source: RolloutSource, prefetch: Prefetch, *, max_staleness: int, lead: int, waits: bool = True
    ) -> None:
        """``waits``: whether a sync waits for what is under way."""
        self.source, self.prefetch, self.waits = source, prefetch, waits
        self.max_staleness = max_staleness
        self.lead = lead

    def rollout(self, windows: Sequence[RequestedWindow]) -> GeneratedWindow:
        """As ``Overlap``. Errors: those of ``Prefetch.collect``."""
        source, step = self.source, windows[0].step
        generated: list[GeneratedWindow] = []
        source.template.preparation.begin(windows[0].samples)

        def attempt() -> int:
            window, num_again = self.collect(windows, source.make_requests, step_of=source.fence.step_of)
            generated[:] = [window]
            return num_again

        again = source.settle(attempt, step=step)
        self.prefetch.forget(step)
        if any(again):
            source.journal.write("asked_again", step=step, num_rollouts=again[source.ranks.rank], by_rank=again)
        return generated[0]

    def min_version(self, step: int, step_of: Mapping[int, int], *, max_staleness: int | None = None) -> int:
        """The oldest version that may be learnt from at ``step``; ``step_of``: version -> the step it was sent at.

        ``max_staleness``: None is that of the run.

        >>> Ahead(None, None, max_staleness=1, lead=1).min_version(7, {3: 5, 4: 6, 5: 7, 6: 7})
        4
        """
        oldest = step - (self.max_staleness if max_staleness is None else max_staleness)
        return min(version for version, sent_at in step_of.items() if sent_at >= oldest)

    def wait_for_next(self) -> None:
        """Wait until the next window is complete, so that a sync does not change its weights half-way.

        Where a server was restarted, the window's rest is generated after the sync, by newer weights.
        """
        if self.early is not None:  # it waits for the window, too
            self.early.wait()
        elif self.waits and self.prefetch.windows:
            with suppress(ServerRestarted):
                self.prefetch.wait_for(min(self.prefetch.windows))

    def collect(
        self, windows: Sequence[RequestedWindow], make_requests: MakeRequests, *, step_of: Mapping[int, int]
    ) -> tuple[GeneratedWindow, int]:
        """Request the windows that are not under way yet, then wait for the first. Errors: as ``Prefetch.collect``.

        Returns also how many of its rollouts had become too old and were generated again.
        """
        for window in windows:
            if window.step not in self.prefetch.windows:
                requests = make_requests(window.samples, window.step)
                self.prefetch.submit(window.step, requests)
        step, early = windows[0].step, self.early
        max_staleness = 0 if early is not None and early.is_lost(step) else None
        min_version = self.min_version(step, step_of, max_staleness=max_staleness)
        rollouts, num_again = self.prefetch.collect(step, min_version=min_version)
        ages = Counter(step - step_of[rollout.policy_version] for rollout in rollouts)
        generated = GeneratedWindow(rollouts=rollouts, staleness=dict(sorted(ages.items())))
        if early is not None:
            for window in windows:
                early.begin(window.step, window.samples)
            generated = replace(generated, early=early.take(step))
        return generated, num_again


class FirstComplete(Ahead):
    """As ``Ahead``, with episodes that no sync waits for; a step takes groups that are complete, see ``OpenGroups``.

    Weights that wrote a token are as new as those of the step in which its window was requested. So no token is older
    than allowed where no group waits beyond its last step. Each rank chooses among its own groups.
    """

    def __init__(self, source: RolloutSource, prefetch: Prefetch, *, max_staleness: int, lead: int) -> None:
        super().__init__(source, prefetch, max_staleness=max_staleness, lead=lead, waits=False)
        self.groups = OpenGroups(lead=lead, max_staleness=max_staleness)

    def rollout(self, windows: Sequence[RequestedWindow]) -> GeneratedWindow:
        """As ``Overlap``, of the groups that were complete first.

        Errors: those of ``Prefetch.collect``, ``rollout-too-old``.
        """
        source, step, size = self.source, windows[0].step, self.prefetch.rules.group_size or 1
        for window in windows:
            if window.step not in self.groups.left:
                self.groups.open(window.step, len(window.samples) // size)
                self.request(window, step=step)
        coming = [(window.step, len(window.samples) // size) for window in windows]
        chosen: list[Group] = []

        def attempt() -> None:
            chosen[:] = self.prefetch.wait_for_groups(step, lambda complete: self.groups.choose(complete, coming))

        source.settle(attempt, step=step)
        self.groups.take(step, chosen)
        left = [window for window, places in self.groups.left.items() if places]
        requests, rollouts = self.prefetch.take(chosen, left=left)
        step_of = source.fence.step_of
        ages = Counter(step - step_of[rollout.policy_version] for rollout in rollouts)
        if max(ages) > self.max_staleness:
            problem = f"step {step} took a rollout that is {max(ages)} steps old"
            remedy = "Is another learner writing to the server?"
            raise RolloutError(problem, code="rollout-too-old", key=str(step), remedy=remedy)
        num_late = sum(window < step for window, _ in chosen)
        source.journal.write("taken", step=step, groups=chosen, num_late=num_late)
        samples = [request.sample for request in requests[::size]]
        return GeneratedWindow(rollouts=rollouts, staleness=dict(sorted(ages.items())), samples=samples)

    def request(self, window: RequestedWindow, *, step: int) -> None:
        """Request what is left of an open window."""
        groups = self.groups.request(window.step, step=step)
        if groups:
            self.prefetch.submit(window.step, self.source.make_requests(window.samples, window.step), groups=groups)


class WithoutRollouts:
    """Stage 1: no rollouts. Every response is empty, so the whole true answer is appended to it.

    Weights are sent for evaluations only. The images of the next window are prepared while this one is learnt.
    """

    prefetch, lead, needs_weights = None, 1, False

    def __init__(self, source: RolloutSource) -> None:
        self.source = source

    def rollout(self, windows: Sequence[RequestedWindow]) -> GeneratedWindow:
        """As ``Overlap``; every response is empty."""
        window, template = windows[0], self.source.template
        features = template.preparation.collect(window.samples)
        for coming in windows[1:]:
            template.preparation.begin(coming.samples)
        rollouts = given_rollouts(self.source, window, features, lambda sample: ())
        return GeneratedWindow(rollouts=rollouts, features=features)


def given_rollouts(
    source: RolloutSource, window: RequestedWindow, features: Mapping[int, ImageFeatures], answer_of: AnswerOf
) -> list[Rollout]:
    """Responses that nobody generated, as if the policy had written them."""
    template = source.template
    return [
        Rollout(
            request_id=f"{window.step}.{source.ranks.rank}.{index}",
            prompt_token_ids=template.expand(template.prompt_token_ids(sample), features[sample.sample_id]),
            response_token_ids=answer_of(sample),
            stop_id=template.vocabulary.stop_id,
            policy_version=source.policy_version,
        )
        for index, sample in enumerate(window.samples)
    ]


def work_early(ahead: Ahead, work: Work) -> None:
    """Let ``work`` make of each window what its targets need, by the weights that wrote its rollouts."""
    ahead.early = early = EarlyWork(ahead.source, ahead.prefetch, work)
    fence, is_quiet = ahead.source.fence, ahead.source.fence.quiet

    @contextmanager
    def quiet() -> Iterator[None]:
        with is_quiet(), early.gate:
            yield

    fence.quiet = quiet


def run_ahead(
    source: RolloutSource, bounds: PrefetchRules, *, max_staleness: int, lead: int, in_flight: InFlight = "wait"
) -> Ahead:
    """Calls beside learning; ``in_flight`` says what a sync does with those under way."""
    servers, waits = cast(ServerBackend, source.fence.backend), in_flight == "wait"
    if source.world is None:
        prefetch = Prefetch(servers, source.decoding, bounds)
        source.fence.quiet = prefetch.quiet if waits else prefetch.held
        return Ahead(source, prefetch, max_staleness=max_staleness, lead=lead, waits=waits)
    world = replace(source.world, may_move=in_flight == "keep")
    episodes = EpisodeServers(servers, world, in_flight=in_flight)
    prefetch = Prefetch(episodes, source.decoding, bounds)

    @contextmanager
    def held() -> Iterator[None]:
        with prefetch.quiet() if waits else prefetch.held(), episodes.held():
            yield

    source.fence.quiet = held
    if bounds.group_size is not None:
        return FirstComplete(source, prefetch, max_staleness=max_staleness, lead=lead)
    return Ahead(source, prefetch, max_staleness=max_staleness, lead=lead, waits=waits)
