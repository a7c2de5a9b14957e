"""An optimizer step that is learnt while its rollouts come back: strictly on-policy, with the gradient of any other.

The micro-batches are those of a step without overlap; only their order is that in which they become whole. What they
are divided by is known when the last rollout is there: ``rollout.early`` keeps graphs or gradients until then.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from rollmatch.learn.batch import MicroBatch
from rollmatch.learn.early import EarlyGradients
from rollmatch.learn.head import Logits, Scoring
from rollmatch.model.template import ImageFeatures
from rollmatch.objectives.protocol import ObjectiveContext, Terms
from rollmatch.records import Rollout, Sample, Segment
from rollmatch.ring import Ring
from rollmatch.rollout.prefetch import Prefetch
from rollmatch.step_report import StepReport

MakeContext = Callable[[dict[int, ImageFeatures]], ObjectiveContext]


class Divisible(Protocol):
    """An objective whose loss is a sum of parts, each over a total of its own."""

    def undivided(self, logits: Logits, batch: MicroBatch) -> tuple[Tensor, ...]:
        """The parts of a micro-batch's loss before they are divided."""

    def divisors_of(self, totals: Any) -> tuple[float, ...]:
        """What each part is divided by; parts are in the order of ``term_names``."""


class StreamedLearning:
    """The part of a trainer that learns from micro-batches, also before the totals of their step are known."""

    ring: Ring
    report: StepReport
    model: Any
    scoring: Scoring
    _early: EarlyGradients | None = None

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """As transformers'; ``num_items_in_batch`` is a ``StreamedStep`` where the step streams."""
        self.ring.check()
        step, learn = num_items_in_batch, super().training_step  # type: ignore[misc]  # the trainer's
        if not isinstance(step, StreamedStep):
            return cast(Tensor, learn(model, inputs, step))
        if step.totals is None:
            return self._learn_early(model, inputs["micro_batch"], step)
        told = self._settle(step)
        return cast(Tensor, learn(model, inputs, step.totals)) + told

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The micro-batch's share of the step's loss, times the ranks that DDP will average over."""
        batch: MicroBatch = inputs["micro_batch"]
        terms: list[Terms] = []

        def score(logits: Logits) -> Tensor:
            terms.append(self.ring.objective.loss(logits, batch, totals=num_items_in_batch))
            return terms[-1].total

        total, outputs = self.scoring(model, batch.inputs, score)
        self.report.add_terms(terms[-1].figures)
        loss = total * self.ring.ranks.learner_world_size
        return (loss, outputs) if return_outputs else loss

    def work_ahead(self) -> bool:
        """Work that need not wait for the totals, if there is any: it comes cheaper once they are known."""
        return self._early is not None and self._early.spend_oldest()

    def _learn_early(self, model: Any, batch: MicroBatch, step: "StreamedStep") -> Tensor:
        self._early = self._early or EarlyGradients(self.model.parameters())
        while self._early.num_kept >= self.ring.graphs_kept:
            self._early.spend_oldest()
        model.train()
        with self.compute_loss_context_manager():  # type: ignore[attr-defined]  # the trainer's
            parts, _ = self.scoring(model, batch.inputs, lambda logits: torch.stack(step.undivided(logits, batch)))
        self._early.keep(parts.unbind())
        return torch.zeros((), device=parts.device)

    def _settle(self, step: "StreamedStep") -> float:
        """Divide what was learnt early; returns its loss as ``training_step`` counts it."""
        if self._early is None:
            return 0.0
        num_ranks = self.ring.ranks.learner_world_size
        values = self._early.settle(step.divisors, scale=num_ranks)
        self.report.add_terms(dict(zip(self.ring.objective.term_names, values, strict=False)))
        return sum(values) * num_ranks


class StreamedStep(Sequence[dict[str, Any]]):
    """What transformers goes through: as many micro-batches as the step has parts, each as soon as it is whole.

    ``totals`` is None until every part of every rank is there; all ranks agree on that before each micro-batch.
    """

    def __init__(
        self,
        ring: Ring,
        parts: Sequence[Sequence[Sample]],
        report: StepReport,
        *,
        make_context: MakeContext,
        work_ahead: Callable[[], bool],
    ) -> None:
        assert ring.prefetch is not None
        self.ring, self.report, self.make_context, self.work_ahead = ring, report, make_context, work_ahead
        self.prefetch: Prefetch = ring.prefetch
        self.parts = parts
        self.order: list[int] = []
        """Parts, as they became whole."""
        self.totals: Any = None
        self._batches: dict[int, MicroBatch] = {}
        self._reports: dict[int, Sequence[Any]] = {}
        samples = list(chain.from_iterable(parts))
        self.prefetch.ask(report.step, ring.make_requests(samples, report.step), [len(part) for part in parts])

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, place: Any) -> Any:
        raise TypeError("what streams is gone through once, from its beginning")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for place in range(len(self.parts)):
            if place == len(self.order):
                self._take()
            if self.totals is None:
                self._agree()
            yield {"micro_batch": self._batches[self.order[place]]}

    @property
    def divisors(self) -> tuple[float, ...]:
        """Of the parts of the loss, once they are known."""
        return cast(Divisible, self.ring.objective).divisors_of(self.totals)

    def undivided(self, logits: Logits, batch: MicroBatch) -> tuple[Tensor, ...]:
        """The parts of an early micro-batch's loss."""
        return cast(Divisible, self.ring.objective).undivided(logits, batch)

    def _take(self) -> None:
        """Wait for the next part, with work that is left over, and make its micro-batch."""
        while not self.prefetch.has_part(self.report.step, taken=self.order) and self.work_ahead():
            pass
        with self.report.phase("rollout"):
            part, rollouts = self.prefetch.next_part(self.report.step, taken=self.order)
        with self.report.phase("target"):
            segments, features = self._target(part, rollouts)
        with self.report.phase("pack"):
            (self._batches[part],) = self.ring.batcher.make(
                segments, lambda sample: features[sample.sample_id], num_batches=1
            )
        self.order.append(part)

    def _target(self, part: int, rollouts: Sequence[Rollout]) -> tuple[list[Segment], dict[int, ImageFeatures]]:
        features = self.ring.check_alignment(self.parts[part], rollouts)
        harvest = self.ring.objective.make_segments(self.parts[part], rollouts, self.make_context(features))
        self._reports[part] = harvest.reports
        return [segment for segments in harvest.segments for segment in segments], features

    def _agree(self) -> None:
        """Whether all ranks have all of theirs; what has come meanwhile is made into micro-batches and counted."""
        if self.prefetch.is_complete(self.report.step):
            while len(self.order) < len(self.parts):
                self._take()
        is_whole = len(self.order) == len(self.parts)
        if all(self.ring.ranks.gather(is_whole)):
            batches = [self._batches[part] for part in range(len(self.parts))]
            supervisions = [batch.supervision for batch in batches]
            self.totals = self.ring.objective.total_of(supervisions, self.ring.ranks.sum)
            self._tell(batches)

    def _tell(self, batches: list[MicroBatch]) -> None:
        """What the step's report and the journal hold of it, in the order of the samples."""
        report, ring = self.report, self.ring
        report.rollouts, _ = self.prefetch.collect(report.step, min_version=0)
        report.reports = [each for part in sorted(self._reports) for each in self._reports[part]]
        report.batches = batches
        ring.tell_generated(report.rollouts, report, purpose="train")
        ring.tell_packed(batches, report, order=self.order)
