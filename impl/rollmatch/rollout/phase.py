"""The rollout phase of a step: a source of rollouts, and three ways in which it overlaps with learning.

==============  ====================================================================================
``Lockstep``    the learner waits until all rollouts of its window are there
``Stream``      a step is learnt part by part while its rollouts arrive; strictly on-policy
``Ahead``       rollouts of later windows are generated while the learner learns from this one
==============  ====================================================================================
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from rollmatch.journal import Journal
from rollmatch.model.images import ImageFeatures
from rollmatch.model.template import Template
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest, Sample
from rollmatch.rollout.backend import Decoding, make_requests
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.prefetch import Prefetch
from rollmatch.rollout.retry import ServerRestarted

MakeRequests = Callable[[Sequence[Sample], int], list[RolloutRequest]]
"""(samples, optimizer step) -> their requests, written to the journal."""
MAX_RESTARTS = 3
"""Restarts of servers during one call that are answered by another sync."""
AGE_UNKNOWN = -(2**31)
"""A policy version below all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSource:
    """Weights and requests out, rollouts back. Made by ``cli.assemble``."""

    template: Template
    fence: Fence
    decoding: Decoding
    eval_decoding: Decoding
    journal: Journal
    ranks: Ranks
    run_seed: int
    num_threads: int | None = None
    """torch's CPU threads during sync and generation; None: unchanged."""

    def sync(self, step: int, weights: Callable[[], Any]) -> float:
        """Send the weights if the learner has moved since the last sync; returns seconds. Errors: ``PushFailed``."""
        with Threads(self.num_threads):
            return self.fence.sync_if_due(step, weights)

    def generate(self, requests: Sequence[RolloutRequest], decoding: Decoding) -> list[Rollout]:
        """Rollouts by the weights of the last sync, one per request, in order.

        A server that is restarted meanwhile gets the weights again, and all requests are generated again. With several
        learner ranks, which would all have to take part in that sync, it is an error: ``ServerRestarted``.
        """
        with Threads(self.num_threads):
            for _ in range(MAX_RESTARTS if self.ranks.learner_world_size == 1 else 0):
                try:
                    return self.fence.backend.generate(requests, decoding)
                except ServerRestarted:
                    self.fence.sync_again()
            return self.fence.backend.generate(requests, decoding)

    def roll_out(self, samples: Sequence[Sample], step: int, *, purpose: str) -> list[Rollout]:
        """One rollout per sample, in order; ``purpose`` is train, eval, or again (segments that became too old)."""
        return self.generate(self.make_requests(samples, step, purpose=purpose), self.decoding_of(purpose))

    def make_requests(self, samples: Sequence[Sample], step: int, *, purpose: str = "train") -> list[RolloutRequest]:
        """The requests of an optimizer step, written to the journal.

        Requests made again have ids and seeds of a rank that does not exist, so they never equal the first ones.
        """
        requests = make_requests(
            samples,
            prompt_of=self.template.prompt_token_ids,
            run_seed=self.run_seed,
            step=step,
            rank=self.ranks.rank + (self.ranks.learner_world_size if purpose == "again" else 0),
        )
        self.journal.write(
            "requested",
            step=step,
            purpose=purpose,
            num_requests=len(requests),
            seeds=[request.seed for request in requests],
            sample_ids=[sample.sample_id for sample in samples],
            decoding=self.decoding_of(purpose).as_dict(),
        )
        return requests

    def decoding_of(self, purpose: str) -> Decoding:
        """How training rollouts, or those of an evaluation, are sampled."""
        return self.eval_decoding if purpose == "eval" else self.decoding

    def check_alignment(self, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> dict[int, ImageFeatures]:
        """Features of each sample's images, by sample id, after checking that the engine saw the learner's prompt."""
        template = self.template
        features: dict[int, ImageFeatures] = {}
        for sample, rollout in zip(samples, rollouts, strict=True):
            if sample.sample_id not in features:
                features[sample.sample_id] = template.image_features(sample)
            prompt = template.expand(template.prompt_token_ids(sample), features[sample.sample_id])
            template.check_alignment(sample, prompt, rollout)
        return features

    @property
    def policy_version(self) -> int:
        """Version of the weights that rollouts are generated with now."""
        return self.fence.backend.policy_version


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

    index: int
    rollouts: list[Rollout]
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Optimizer steps since the weights that generated a rollout -> number of rollouts; empty: none."""
    num_regenerated: int = 0
    """Rollouts that had become too old and were generated again."""


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

    def rollout(self, windows: Sequence[RequestedWindow]) -> Iterator[RolloutPart]:
        """The parts of the first window as they become complete; the ``lead`` windows behind it are requested."""

    def has_part(self) -> bool:
        """Whether the next part can be had without waiting, or nothing is left to wait for."""

    def is_complete(self) -> bool:
        """Whether all rollouts of the window have arrived."""


class Lockstep:
    """Generate, then learn."""

    prefetch, lead, streams = None, 0, False

    def __init__(self, source: RolloutSource) -> None:
        self.source = source

    def rollout(self, windows: Sequence[RequestedWindow]) -> Iterator[RolloutPart]:
        """As ``Overlap``: one part."""
        window = windows[0]
        yield RolloutPart(index=0, rollouts=self.source.roll_out(window.samples, window.step, purpose="train"))

    def has_part(self) -> bool:
        """As ``Overlap``."""
        return True

    def is_complete(self) -> bool:
        """As ``Overlap``."""
        return True


class Stream:
    """Parts of one window in the order in which they become complete."""

    lead, streams = 0, True

    def __init__(self, source: RolloutSource, prefetch: Prefetch) -> None:
        self.source, self.prefetch = source, prefetch
        self._step: int | None = None
        self._taken: list[int] = []

    def rollout(self, windows: Sequence[RequestedWindow]) -> Iterator[RolloutPart]:
        """As ``Overlap``. Errors: those of ``Prefetch.collect``."""
        window = windows[0]
        self._step, self._taken = window.step, []
        self.prefetch.ask(window.step, self.source.make_requests(window.samples, window.step), window.parts)
        return self._parts(window)

    def has_part(self) -> bool:
        """As ``Overlap``. Errors: those of the calls."""
        return self._step is None or self.prefetch.has_part(self._step, taken=self._taken)

    def is_complete(self) -> bool:
        """As ``Overlap``."""
        return self._step is None or self.prefetch.is_complete(self._step)

    def _parts(self, window: RequestedWindow) -> Iterator[RolloutPart]:
        while len(self._taken) < len(window.parts):
            index, rollouts = self.prefetch.next_part(window.step, taken=self._taken)
            self._taken.append(index)
            if len(self._taken) == len(window.parts):
                self.prefetch.collect(window.step, min_version=0)
                self._step = None
            yield RolloutPart(index=index, rollouts=rollouts)


class Ahead:
    """Keeps windows under way; learning from them stays in the learner's order.

    ``lead`` windows are requested in advance, ``max_staleness`` is how many optimizer steps old a rollout may be when
    its window begins; where segments may wait for a row, the lead is smaller. A version number is no age: an evaluation
    and a restarted server get a version of their own. Ranks decide alike without communication: what is requested and
    what is too old follow from the step, and from which version was sent at which step.
    """

    streams = False

    def __init__(self, source: RolloutSource, prefetch: Prefetch, *, max_staleness: int, lead: int) -> None:
        self.source, self.prefetch = source, prefetch
        self.max_staleness = max_staleness
        self.lead = lead

    def rollout(self, windows: Sequence[RequestedWindow]) -> Iterator[RolloutPart]:
        """As ``Overlap``: one part. Errors: those of ``Prefetch.collect``."""
        source = self.source
        part = self.collect(windows, source.make_requests, step_of=source.fence.step_of)
        again = source.ranks.gather(part.num_regenerated)
        if any(again):
            num = again[source.ranks.rank]
            source.journal.write("asked_again", step=windows[0].step, num_rollouts=num, by_rank=again)
        yield part

    def has_part(self) -> bool:
        """As ``Overlap``."""
        return True

    def is_complete(self) -> bool:
        """As ``Overlap``."""
        return True

    def min_version(self, step: int, step_of: Mapping[int, int]) -> int:
        """The oldest version that may be learnt from at ``step``; ``step_of``: version -> the step it was sent at.

        >>> Ahead(None, None, max_staleness=1, lead=1).min_version(7, {3: 5, 4: 6, 5: 7, 6: 7})
        4
        """
        return min(version for version, sent_at in step_of.items() if sent_at >= step - self.max_staleness)

    def wait_for_next(self) -> None:
        """Wait until the next window is complete, so that a sync does not change its weights half-way."""
        if self.prefetch.windows:
            self.prefetch.wait_for(min(self.prefetch.windows))

    def collect(
        self, windows: Sequence[RequestedWindow], make_requests: MakeRequests, *, step_of: Mapping[int, int]
    ) -> RolloutPart:
        """Request the windows that are not under way yet, then wait for the first. Errors: as ``Prefetch.collect``."""
        for window in windows:
            if window.step not in self.prefetch.windows:
                requests = make_requests(window.samples, window.step)
                self.prefetch.ask(window.step, requests, (len(requests),))
        step = windows[0].step
        rollouts, num_again = self.prefetch.collect(step, min_version=self.min_version(step, step_of))
        ages = Counter(step - step_of[rollout.policy_version] for rollout in rollouts)
        return RolloutPart(index=0, rollouts=rollouts, staleness=dict(sorted(ages.items())), num_regenerated=num_again)


class Threads:
    """torch's CPU threads inside a phase, and back to what they were."""

    def __init__(self, num_threads: int | None) -> None:
        self.num_threads = num_threads
        self.before = torch.get_num_threads()

    def __enter__(self) -> None:
        if self.num_threads:
            torch.set_num_threads(self.num_threads)

    def __exit__(self, *exception: object) -> None:
        if self.num_threads:
            torch.set_num_threads(self.before)
