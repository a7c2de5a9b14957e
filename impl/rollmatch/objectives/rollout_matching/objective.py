"""Rollout matching as an objective: what was found is corrected in place, what was missed is appended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rollmatch.learn.batch import MicroBatch
from rollmatch.learn.head import Logits
from rollmatch.learn.loss import (
    LossRules,
    LossTerms,
    LossTotals,
    count_totals,
    logit_indices,
    masked_loss,
    masked_loss_of_kept,
)
from rollmatch.learn.mask import BinOf, MaskRules, mask_segment, place_supervisions
from rollmatch.objectives.evaluation import describe_scene, score
from rollmatch.objectives.protocol import Evaluated, Harvest, Means, Reuse
from rollmatch.objectives.rollout_matching.target import RolloutMatching, RolloutReport, summarize
from rollmatch.records import Rollout, Sample, Segment, Supervision


@dataclass(frozen=True, kw_only=True)
class RolloutMatchingObjective:
    """``trainer_variant: rollout_matching_sft``."""

    target: RolloutMatching
    eval_target: RolloutMatching
    mask_rules: MaskRules
    loss_rules: LossRules
    bin_of: BinOf
    reuse: ClassVar[Reuse] = Reuse()
    term_names: ClassVar[tuple[str, ...]] = ("loss_ce", "loss_coord")
    wants_logprobs: ClassVar[bool] = False

    def make_segments(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], means: Means) -> Harvest:
        """One segment and one report per sample."""
        segments, reports = self.target.make_segments(samples, rollouts)
        return Harvest(segments=tuple((segment,) for segment in segments), reports=tuple(reports))

    def supervise(self, segments: Sequence[Segment], *, starts: Sequence[int], num_tokens: int) -> Supervision:
        """Prefix slots and the tail. Errors: as ``mask_segment``."""
        masks = [mask_segment(segment, rules=self.mask_rules, bin_of=self.bin_of) for segment in segments]
        return place_supervisions(masks, starts=starts, num_tokens=num_tokens)

    def logit_indices(self, supervision: Supervision) -> tuple[int, ...]:
        """Before each supervised token."""
        return logit_indices(supervision)

    def total_of(
        self, supervisions: Sequence[Supervision], sum_over_ranks: Callable[[Sequence[float]], list[float]]
    ) -> LossTotals:
        """Weight of text and number of slots."""
        mine = count_totals(supervisions)
        text_weight, num_slots = sum_over_ranks([mine.text_weight, float(mine.num_slots)])
        return LossTotals(text_weight=text_weight, num_slots=round(num_slots))

    def loss(self, logits: Logits, batch: MicroBatch, *, totals: LossTotals) -> LossTerms:
        """Cross-entropy of text, and the loss of coordinate slots. Errors: as ``masked_loss``."""
        score_logits = masked_loss_of_kept if batch.is_packed else masked_loss
        return score_logits(logits, supervision=batch.supervision, rules=self.loss_rules, totals=totals)

    def undivided(self, logits: Logits, batch: MicroBatch) -> tuple[Tensor, ...]:
        """The parts of a micro-batch's loss before they are divided by what the step supervises."""
        own = count_totals([batch.supervision])
        parts = self.loss(logits, batch, totals=own).parts
        return tuple(part * divisor for part, divisor in zip(parts, self.divisors_of(own), strict=True))

    def divisors_of(self, totals: LossTotals) -> tuple[float, ...]:
        """What each part is divided by; totals of zero mean sums of zero."""
        return totals.text_weight or 1.0, float(totals.num_slots or 1)

    def summarize(self, reports: Sequence[RolloutReport]) -> dict[str, float]:
        """Rates and means, and the number of objects that were appended."""
        return summarize(reports) | {"appended": float(sum(report.appended for report in reports))}

    def evaluate(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], means: Means) -> Evaluated:
        """Matched at the gate of evaluations; every scene is described."""
        target = self.eval_target
        scenes: list[dict[str, Any]] = [
            describe_scene(sample, rollout, vocabulary=target.vocabulary, rules=target.match_rules)
            for sample, rollout in zip(samples, rollouts, strict=True)
        ]
        record = {"iou_threshold": target.match_rules.maskiou_gate, "scenes": scenes}
        return Evaluated(metrics=score(samples, rollouts, target), record=record)
