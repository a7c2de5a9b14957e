"""The contract between the trainer and an objective: what each provides to the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

from torch import Tensor, nn

from rollmatch.data.order import Reuse
from rollmatch.learn.batch import Batcher, MicroBatch, Supervisor
from rollmatch.learn.deal import PassSize
from rollmatch.learn.head import Logits, Scoring
from rollmatch.learn.score import score_without_adapters
from rollmatch.model.overlong import LengthRules
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest, Sample, Segment
from rollmatch.rollout.backend import Decoding


class ScoreSegments(Protocol):
    """Log-probabilities of each segment's target tokens, [L - P], by the learner's own forward pass."""

    def __call__(self, segments: Sequence[Segment], *, reference: bool = False) -> list[tuple[float, ...]]:
        """In order; with ``reference`` by the policy as it was before training (adapters off)."""


class LogEvent(Protocol):
    """Write an event into the journal."""

    def __call__(self, event: str, **fields: Any) -> object:
        """``fields`` are plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveContext:
    """What an objective may use while it makes targets. Made by ``trainer``; every rank uses it equally often."""

    step: int
    ranks: Ranks
    decoding: Decoding
    """Of the rollouts at hand."""
    generate: Callable[[Sequence[RolloutRequest], Decoding], list[Rollout]]
    """More rollouts by the same weights, in order. All ranks call it equally often, also without requests."""
    score: ScoreSegments
    log: LogEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTargets:
    """The segments that rollouts became, and reports on them. Made by an objective, consumed by ``trainer``."""

    segments: tuple[tuple[Segment, ...], ...]
    """For each sample, in order, the segments that its rollouts are learnt from."""
    reports: tuple[Any, ...] = ()
    """Of each rollout; what ``summarize`` takes."""
    num_rollout_tokens: int | None = None
    """Of all turns, where the rollouts at hand were only the first ones."""
    num_skipped: int = 0
    """Segments that were too long, and are stubs without supervision now."""
    num_cut: int = 0
    """Segments that were too long, and lack the beginning of their prompt now."""


class Terms(Protocol):
    """A micro-batch's share of the step's loss."""

    @property
    def total(self) -> Tensor:
        """With its graph."""

    @property
    def figures(self) -> Mapping[str, float]:
        """What adds up over the micro-batches of a step, by its name in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What the rollouts of held-out samples showed."""

    metrics: Mapping[str, float]
    record: Mapping[str, Any] = field(default_factory=dict)
    """What the evaluation's file holds besides."""


class Objective(Supervisor, Protocol):
    """Rollouts in, gradients out."""

    @property
    def reuse(self) -> Reuse:
        """How often rollouts are learnt from."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """Names of ``Terms.figures``."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether the engine returns each sampled token's log-probability."""

    def make_segments(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext
    ) -> TrainingTargets:
        """Rollouts of a whole window: ``num_rollouts`` for each sample, one after the other."""

    def total_of(self, supervisions: Sequence[Any], sum_over_ranks: Callable[[Sequence[float]], list[float]]) -> Any:
        """What the whole optimizer step supervises: all micro-batches of all ranks. Not None."""

    def loss(self, logits: Logits, batch: MicroBatch, *, totals: Any) -> Terms:
        """The share of a micro-batch; shares add up over micro-batches and ranks. ``logits``, or what stands for them,
        are [K, V] at ``logit_indices`` where the batch is packed, [B * L, V] else."""

    def summarize(self, reports: Sequence[Any]) -> dict[str, float]:
        """Figures of a window's rollouts; the same keys whatever they hold."""

    def evaluate(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext) -> Evaluated:
        """One rollout per held-out sample, in order; all ranks hold them all."""


class Divisible(Objective, Protocol):
    """An objective whose loss is a sum of parts, each over a total of its own; ``overlap: stream`` needs one."""

    def undivided(self, logits: Logits, batch: MicroBatch) -> tuple[Tensor, ...]:
        """The parts of a micro-batch's loss before they are divided."""

    def divisors_of(self, totals: Any) -> tuple[float, ...]:
        """What each part is divided by; parts are in the order of ``term_names``."""


class PolicyObjective(Objective, Protocol):
    """An objective that compares log-probabilities of the policy with those of other weights."""

    def logprobs(self, logits: Logits, batch: MicroBatch) -> Tensor:
        """[K] log-probabilities of what the micro-batch supervises; ``logits`` as in ``loss``."""

    def with_reference(self, batch: MicroBatch, logprobs: Tensor) -> MicroBatch:
        """The micro-batch with those of the reference, [K]."""

    def with_old_logprobs(self, segments: Sequence[Segment], score: ScoreSegments) -> list[Segment]:
        """Segments that a later step learns from, with those of the weights as they are now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """What segments are learnt with. Made by ``cli.assemble``, used by ``trainer``."""

    objective: Objective
    batcher: Batcher
    reference: nn.Module | None = None
    """The policy before training, where it is not the policy without its adapters."""
    reference_in_batch: bool = False
    """Whether each micro-batch is scored by the policy without its adapters before it is learnt from."""
    scores_waiting: bool = False
    """Whether segments that wait for a row of a later step need old log-probabilities."""
    graphs_kept: int
    """Graphs of micro-batches that are kept until the totals of a streamed step are known."""
    lengths: LengthRules | None = None
    """The longest segment; None: no limit but a row's."""

    def with_reference(self, model: nn.Module, batch: MicroBatch, scoring: Scoring) -> MicroBatch:
        """The micro-batch with log-probabilities of the policy without its adapters, where these are wanted."""
        if not self.reference_in_batch:
            return batch
        objective = cast(PolicyObjective, self.objective)
        logprobs = score_without_adapters(model, batch.inputs, partial(objective.logprobs, batch=batch), scoring)
        return objective.with_reference(batch, logprobs)

    def pass_size(self, num_samples: int) -> PassSize:
        """Of a pass without gradients: rollouts of ``num_samples`` samples, or as many tokens as a micro-batch has."""
        return PassSize(segments=num_samples * self.objective.reuse.num_rollouts, tokens=self.batcher.tokens_per_batch)

    def score_waiting(self, score: ScoreSegments) -> int:
        """Number of segments that wait for a row of a later step; they get old log-probabilities where needed."""
        packer = self.batcher.packer
        if packer is None:
            return 0
        if self.scores_waiting:
            packer.restore(cast(PolicyObjective, self.objective).with_old_logprobs(packer.state(), score))
        return packer.buffered

    def make_targets(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext
    ) -> TrainingTargets:
        """The objective's, each segment fitted to ``lengths``. Errors: ``SegmentTooLong``."""
        made = self.objective.make_segments(samples, rollouts, context)
        if self.lengths is None:
            return made
        long = [s for segments in made.segments for s in segments if s.encoded_len > self.lengths.max_len]
        if not long:
            return made
        fitted = tuple(tuple(self.lengths.fit(segment) for segment in segments) for segments in made.segments)
        num_cut = sum(self.lengths.fit(segment).train_len == segment.train_len for segment in long)
        return replace(made, segments=fitted, num_skipped=len(long) - num_cut, num_cut=num_cut)
