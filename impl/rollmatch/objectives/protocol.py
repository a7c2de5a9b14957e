"""The contract between the trainer and an objective: what each provides to the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from rollmatch.data.order import Reuse
from rollmatch.environments.episode import Episode
from rollmatch.learn.batch import MicroBatch, Supervisor
from rollmatch.learn.head import Logits
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest, Sample, Segment, Teaching
from rollmatch.rollout.backend import Decoding

if TYPE_CHECKING:
    from transformers import TrainerState


class ScoreSegments(Protocol):
    """Log-probabilities of each segment's target tokens, [L - P], by the learner's own forward pass."""

    def __call__(self, segments: Sequence[Segment], *, reference: bool = False) -> list[tuple[float, ...]]:
        """In order; with ``reference`` by the policy as it was before training (adapters off)."""


class AskModel(Protocol):
    """Log-probabilities of each segment's target tokens by any model of the learner's process."""

    def __call__(self, segments: Sequence[Segment], *, model: nn.Module | None, top_k: int) -> list[Teaching]:
        """In order, with the ``top_k`` likeliest ids at each place; None is the policy. All ranks call it."""


class RollOutFurther(Protocol):
    """Groups of further samples, by the same weights."""

    def __call__(self, num: int) -> list[tuple[Sample, Rollout]]:
        """The rollouts of ``num`` samples that no rank has seen in this window, or of as many as the data set has left;
        one entry per rollout. All ranks call it equally often, also with 0."""


class LogEvent(Protocol):
    """Write an event into the journal."""

    def __call__(self, event: str, **fields: Any) -> object:
        """``fields`` are plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationContext:
    """Rollouts' decoding and where more of them come from. Every rank uses it equally often, in one thread."""

    step: int
    ranks: Ranks
    decoding: Decoding
    """Of the rollouts at hand."""
    generate: Callable[[Sequence[RolloutRequest], Decoding], list[Rollout]]
    """More rollouts by the same weights, in order. All ranks call it equally often, also without requests."""
    play: Callable[[Sequence[Episode], Decoding], None]
    """Episodes to their ends, by the same weights. All ranks call it equally often, also without episodes."""
    log: LogEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveContext(GenerationContext):
    """What an objective may use while it makes targets. Made by ``training``."""

    score: ScoreSegments
    teach: AskModel
    further: RollOutFurther
    trainer_state: "TrainerState | None" = None
    """transformers' state of the run, for functions that ask for it."""
    early: Any = None
    """What the objective made of these rollouts beside learning, see ``rollout.early``; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTargets:
    """The segments that rollouts became, and reports on them. Made by an objective, consumed by ``training``."""

    segments: tuple[tuple[Segment, ...], ...]
    """For each sample, in order, the segments that its rollouts are learnt from."""
    reports: tuple[Any, ...] = ()
    """Of each rollout; what ``summarize`` takes."""
    completions: tuple[tuple[Sample, Rollout], ...] | None = None
    """What the segments were made from, where it is not the rollouts at hand."""
    num_rollout_tokens: int | None = None
    """Of all rounds and turns, where it is not those of the rollouts' responses."""
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
    parts: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Metric -> what each sample adds to its numerator and to its denominator, in their order."""


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


class PolicyObjective(Objective, Protocol):
    """An objective that compares log-probabilities of the policy with those of other weights."""

    def logprobs(self, logits: Logits, batch: MicroBatch) -> Tensor:
        """[K] log-probabilities of what the micro-batch supervises; ``logits`` as in ``loss``."""

    def with_reference(self, batch: MicroBatch, logprobs: Tensor) -> MicroBatch:
        """The micro-batch with those of the reference, [K]."""

    def with_old_logprobs(self, segments: Sequence[Segment], score: ScoreSegments) -> list[Segment]:
        """Segments that a later step learns from, with those of the weights as they are now."""
