"""What segments are learnt with: the objective, the batcher, and the reference."""

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from torch import nn

from rollmatch.learn.average import WeightAverage
from rollmatch.learn.batch import Batcher, MicroBatch
from rollmatch.learn.head import Scoring
from rollmatch.learn.pack import Packer
from rollmatch.learn.score import score_without_adapters
from rollmatch.model.overlong import LengthRules
from rollmatch.objectives.protocol import Objective, PolicyObjective, ScoreSegments, TrainingTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """What segments are learnt with. Made by ``run.assemble``, used by ``RolloutTrainer``."""

    objective: Objective
    batcher: Batcher
    reference: nn.Module | None
    """The policy before training, where it is not the policy without its adapters."""
    reference_in_batch: bool
    """Whether each micro-batch is scored by the policy without its adapters before it is learnt from."""
    scores_waiting: bool
    """Whether segments that wait for a row of a later step need old log-probabilities."""
    lengths: LengthRules
    """The longest segment."""
    averages: tuple[WeightAverage, ...] = ()
    """Of the policy's weights, kept up to date by the trainer and saved with it."""

    def with_reference(self, model: nn.Module, batch: MicroBatch, scoring: Scoring) -> MicroBatch:
        """The micro-batch with log-probabilities of the policy without its adapters."""
        objective = cast(PolicyObjective, self.objective)
        logprobs = score_without_adapters(model, batch.inputs, partial(objective.logprobs, batch=batch), scoring)
        return objective.with_reference(batch, logprobs)

    def score_waiting(self, packer: Packer, score: ScoreSegments) -> None:
        """Give segments that wait for a row of a later step old log-probabilities."""
        packer.restore(cast(PolicyObjective, self.objective).with_old_logprobs(packer.state(), score))

    def fitted(self, made: TrainingTargets) -> TrainingTargets:
        """With each segment that is longer than ``lengths`` fitted to them. Errors: ``SegmentTooLong``."""
        long = [s for segments in made.segments for s in segments if s.encoded_len > self.lengths.max_len]
        fitted = tuple(tuple(self.lengths.fit(segment) for segment in segments) for segments in made.segments)
        num_cut = sum(self.lengths.fit(segment).train_len == segment.train_len for segment in long)
        return replace(made, segments=fitted, num_skipped=len(long) - num_cut, num_cut=num_cut)
