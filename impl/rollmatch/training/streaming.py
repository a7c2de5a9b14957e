"""An optimizer step that is learnt while its rollouts arrive: strictly on-policy, with the gradient of any other.

The micro-batches are the parts of the window, in the order in which they become complete; a step without overlap
divides its segments by their lengths. Their divisors are known when the last rollout is there: ``learn.early`` keeps
graphs or gradients until then.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rollmatch.learn.batch import MicroBatch, Passes
from rollmatch.learn.early import EarlyGradients
from rollmatch.learn.head import Scoring
from rollmatch.model.images import ImageFeatures
from rollmatch.objectives.protocol import Divisible, TrainingTargets
from rollmatch.records import Rollout
from rollmatch.rollout.overlap import Stream
from rollmatch.training.report import StepReport
from rollmatch.training.segment_trainer import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTargets:
    """What the rollouts of a part became. Made by the trainer's ``target``, consumed by its ``learn``."""

    index: int
    rollouts: Sequence[Rollout]
    targets: TrainingTargets
    features: dict[int, ImageFeatures]
    """By sample id."""


class StreamedStep(Sequence[Passes]):
    """The micro-batches of one step, one per part, each as soon as its part is complete.

    ``totals`` is None until every part of every rank is there; all ranks agree on that before each micro-batch.
    """

    def __init__(
        self,
        targets: Iterator[PartTargets],
        report: StepReport,
        early: EarlyGradients,
        *,
        learner: Learner,
        overlap: Stream,
    ) -> None:
        self.targets, self.report, self.num_parts = targets, report, report.num_batches
        self.early = early
        self.learner = learner
        self.overlap = overlap
        self.source = overlap.source
        self.objective = cast(Divisible, learner.objective)
        self.order: list[int] = []
        """Parts, as they became complete."""
        self.totals: Any = None
        self._parts: dict[int, PartTargets] = {}
        self._batches: dict[int, MicroBatch] = {}

    def __len__(self) -> int:
        return self.num_parts

    def __getitem__(self, place: Any) -> Any:
        raise TypeError("a streamed step is iterated once, from its beginning")

    def __iter__(self) -> Iterator[Passes]:
        for place in range(self.num_parts):
            if self.totals is None:
                self._agree(place)
            yield {"passes": (self._batches[self.order[place]],)}

    def learn_early(self, model: torch.nn.Module, batch: MicroBatch, scoring: Scoring) -> Tensor:
        """Keep the graph of a micro-batch whose divisors are not known yet; its loss is reported by ``settle``."""
        while self.early.num_kept >= self.learner.graphs_kept:
            self.early.spend_oldest()
        model.train()
        parts, _ = scoring(model, batch.inputs, lambda logits: torch.stack(self.objective.undivided(logits, batch)))
        self.early.keep(parts.unbind())
        return torch.zeros((), device=parts.device)

    def settle(self) -> float:
        """Divide what was learnt early; returns its loss as ``training_step`` counts it."""
        num_ranks = self.source.ranks.learner_world_size
        values = self.early.settle(self.objective.divisors_of(self.totals), scale=num_ranks)
        self.report.add_terms(dict(zip(self.objective.term_names, values)))
        return sum(values) * num_ranks

    def work_ahead(self) -> bool:
        """Backward of the oldest graph that is kept, which need not wait for the totals; False: none is kept."""
        return self.early.spend_oldest()

    def _arrive(self, place: int) -> bool:
        """Take the part at ``place`` of the order, and all others that are there; returns whether these are all."""
        if place == len(self.order):
            while not self.overlap.has_part() and self.work_ahead():
                pass
            with self.report.phase("rollout"):
                self.overlap.wait_for_part()
            self._take()
        if self.overlap.is_complete():
            while len(self.order) < self.num_parts:
                self._take()
        return len(self.order) == self.num_parts

    def _take(self) -> None:
        """Make the micro-batch of the next part, which is there."""
        part = next(self.targets)
        segments = [segment for segments in part.targets.segments for segment in segments]
        with self.report.phase("pack"):
            (self._batches[part.index],) = self.learner.batcher.make(
                segments, lambda sample: part.features[sample.sample_id], num_batches=1
            )
        self._parts[part.index] = part
        self.order.append(part.index)

    def _agree(self, place: int) -> None:
        """Whether all ranks have all of theirs; what has arrived meanwhile is made into micro-batches and counted.

        A server that was restarted under any rank gets the weights again here: they are those of this step.
        """
        if all(self.source.settle(lambda: self._arrive(place), step=self.report.step)):
            self._finish([self._batches[part] for part in range(self.num_parts)])

    def _finish(self, batches: list[MicroBatch]) -> None:
        """Count the totals, and report the step in the order of the samples."""
        report, source, parts = self.report, self.source, [self._parts[index] for index in range(self.num_parts)]
        self.totals = self.objective.total_of([batch.supervision for batch in batches], source.ranks.sum)
        report.rollouts = [rollout for part in parts for rollout in part.rollouts]
        report.reports = [each for part in parts for each in part.targets.reports]
        report.batches = batches
        event = report.generated(report.rollouts, policy_version=source.policy_version)
        source.journal.write("generated", purpose="train", **event)
        source.journal.write("packed", **report.packed(order=self.order))
