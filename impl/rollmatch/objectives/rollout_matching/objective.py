"""Rollout matching: what the model found is kept and corrected in place, what it missed is appended.

Per sample: parse the response, match its objects with the true ones, teach matched slots the true bins, append the
missed objects. False positives stay as context without labels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rollmatch.data import Reuse
from rollmatch.errors import TargetError
from rollmatch.learn.batch import MicroBatch
from rollmatch.learn.head import Logits
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.protocol import Evaluated, ObjectiveContext, TrainingTargets
from rollmatch.objectives.rollout_matching.elements import (
    DescChangedByTokenizer,
    DescHoldsAddedToken,
    DropReason,
    Tail,
    append_missed,
)
from rollmatch.objectives.rollout_matching.loss import (
    LossRules,
    LossTerms,
    LossTotals,
    count_totals,
    logit_indices,
    masked_loss,
    masked_loss_of_kept,
)
from rollmatch.objectives.rollout_matching.match import MatchRules, match_objects
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.supervision import (
    BinOf,
    MaskRules,
    TransportRules,
    coordinate_targets,
    mask_segment,
    place_supervisions,
)
from rollmatch.records import Matching, ParsedRollout, Rollout, Sample, Segment, Supervision


class RolloutsMisaligned(TargetError):
    """Every sample has exactly one rollout, in the same order."""

    code = "rollouts-misaligned"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """What one rollout was worth. Made here, used by ``summarize``, ``trainer`` and ``report``."""

    num_predicted: int
    """Valid objects; dropped ones count in ``drops`` only."""
    num_truth: int
    num_matched: int
    num_desc_correct: int
    """Matched, and the description is equal, character for character."""
    iou_sum: float
    """Of the matched pairs' mask IoU."""
    drops: Mapping[str, int]
    """``DropReason`` -> count."""
    invalid: bool
    truncated: bool
    response_len: int
    """Tokens as sampled."""
    prefix_len: int
    """Tokens kept, as sampled."""
    appended: int
    """True objects written into the tail."""
    gating_rejections: int


class RolloutMatching:
    """Rollouts in, segments out. Errors: ``RolloutsMisaligned`` and those of parse and append."""

    def __init__(self, vocabulary: Vocabulary, match_rules: MatchRules, transport_rules: TransportRules) -> None:
        self.vocabulary = vocabulary
        self.match_rules = match_rules
        self.transport_rules = transport_rules

    def make_segments(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout]
    ) -> tuple[list[Segment], list[RolloutReport]]:
        """One segment and one report per sample, in order; errors about a description name the sample's origin."""
        if len(samples) != len(rollouts):
            raise RolloutsMisaligned(f"{len(samples)} samples, {len(rollouts)} rollouts", key="rollouts")
        made = [self._make_segment(sample, rollout) for sample, rollout in zip(samples, rollouts, strict=True)]
        return [segment for segment, _ in made], [report for _, report in made]

    def _make_segment(self, sample: Sample, rollout: Rollout) -> tuple[Segment, RolloutReport]:
        parsed = parse_rollout(rollout.response_token_ids, self.vocabulary)
        matching = match_objects(parsed.objects, sample.objects, self.match_rules)
        tail = self._append(sample, parsed, matching)
        prompt_len, prefix_len = len(rollout.prompt_token_ids), len(parsed.prefix_token_ids)
        slots = self._coord_slots(sample, parsed, matching)
        segment = Segment(
            sample=sample,
            policy_version=rollout.policy_version,
            token_ids=(*rollout.prompt_token_ids, *parsed.prefix_token_ids, *tail.token_ids),
            prompt_len=prompt_len,
            prefix_len=prefix_len,
            coord_positions=tuple(prompt_len + position for position, _ in slots),
            coord_bins=tuple(coord_bin for _, coord_bin in slots),
            desc_positions=tuple(prompt_len + prefix_len + position for position in tail.desc_positions),
        )
        return segment, _make_report(sample, rollout, parsed=parsed, matching=matching)

    def _append(self, sample: Sample, parsed: ParsedRollout, matching: Matching) -> Tail:
        missed = [sample.objects[index] for index in matching.false_negatives]
        try:
            return append_missed(parsed, missed, self.vocabulary)
        except (DescHoldsAddedToken, DescChangedByTokenizer) as error:
            raise type(error)(error.problem, key=sample.origin, remedy=error.remedy) from error

    def _coord_slots(self, sample: Sample, parsed: ParsedRollout, matching: Matching) -> list[tuple[int, int]]:
        """(index in the prefix, true bin) of the slots of matched objects, ascending, as objects are in order."""
        slots: list[tuple[int, int]] = []
        for predicted_index, truth_index in matching.pairs:
            predicted = parsed.objects[predicted_index]
            targets = coordinate_targets(predicted, sample.objects[truth_index], self.transport_rules)
            slots.extend(zip(predicted.positions, targets, strict=True))
        return slots


def _make_report(sample: Sample, rollout: Rollout, *, parsed: ParsedRollout, matching: Matching) -> RolloutReport:
    descs = [(parsed.objects[index].desc, sample.objects[partner].desc) for index, partner in matching.pairs]
    return RolloutReport(
        num_predicted=len(parsed.objects),
        num_truth=len(sample.objects),
        num_matched=len(matching.pairs),
        num_desc_correct=sum(predicted == true for predicted, true in descs),
        iou_sum=sum(matching.ious),
        drops=parsed.drops,
        invalid=parsed.invalid,
        truncated=parsed.truncated,
        response_len=len(rollout.response_token_ids),
        prefix_len=len(parsed.prefix_token_ids),
        appended=len(matching.false_negatives),
        gating_rejections=matching.gating_rejections,
    )


def summarize(reports: Sequence[RolloutReport]) -> dict[str, float]:
    """Figures of many rollouts; the same keys whatever they hold, every ``drop/<reason>`` included.

    Counts are summed first, then divided: a scene without truth and without prediction adds nothing, f1 is
    ``2 matched / (predicted + truth)``. 0/0 is 0.0: where nothing was shown, nothing was earned.
    ``f1_desc`` counts a match only if its description is right, ``mean_iou`` is over matched pairs, the rates are
    over rollouts.
    """
    predicted = sum(report.num_predicted for report in reports)
    truth = sum(report.num_truth for report in reports)
    matched = sum(report.num_matched for report in reports)
    correct = sum(report.num_desc_correct for report in reports)
    drops = {f"drop/{reason}": float(sum(r.drops.get(reason, 0) for r in reports)) for reason in DropReason}
    return {
        "precision": _ratio(matched, predicted),
        "recall": _ratio(matched, truth),
        "f1": _ratio(2 * matched, predicted + truth),
        "f1_desc": _ratio(2 * correct, predicted + truth),
        "mean_iou": _ratio(sum(report.iou_sum for report in reports), matched),
        "invalid_rate": _ratio(sum(report.invalid for report in reports), len(reports)),
        "truncated_rate": _ratio(sum(report.truncated for report in reports), len(reports)),
        **drops,
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


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

    def make_segments(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext
    ) -> TrainingTargets:
        """One segment and one report per sample."""
        segments, reports = self.target.make_segments(samples, rollouts)
        return TrainingTargets(segments=tuple((segment,) for segment in segments), reports=tuple(reports))

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

    def evaluate(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext) -> Evaluated:
        """Matched at the gate of evaluations; every scene is described."""
        target = self.eval_target
        scenes: list[dict[str, Any]] = [
            describe_scene(sample, rollout, vocabulary=target.vocabulary, rules=target.match_rules)
            for sample, rollout in zip(samples, rollouts, strict=True)
        ]
        record = {"iou_threshold": target.match_rules.maskiou_gate, "scenes": scenes}
        return Evaluated(metrics=score(samples, rollouts, target), record=record)


def describe_scene(sample: Sample, rollout: Rollout, *, vocabulary: Vocabulary, rules: MatchRules) -> dict[str, Any]:
    """One scene as the report draws it: truth, predictions with their partners, and the raw answer."""
    parsed = parse_rollout(rollout.response_token_ids, vocabulary)
    matching = match_objects(parsed.objects, sample.objects, rules)
    partners = {mine: (true, iou) for (mine, true), iou in zip(matching.pairs, matching.ious, strict=True)}
    truth = [{"desc": o.desc, "geometry": o.geometry.value, "bins": list(o.bins)} for o in sample.objects]
    predicted = []
    for index, found in enumerate(parsed.objects):
        partner, iou = partners.get(index, (None, None))
        shape = {"desc": found.desc, "geometry": found.geometry.value, "bins": list(found.bins)}
        predicted.append(shape | {"partner": partner, "iou": iou})
    return {
        "sample_id": sample.sample_id,
        "image": sample.images[0],
        "width": sample.width,
        "height": sample.height,
        "truth": truth,
        "predicted": predicted,
        "response_text": vocabulary.text(rollout.response_token_ids),
        "invalid": parsed.invalid,
    }


def score(samples: Sequence[Sample], rollouts: Sequence[Rollout], target: RolloutMatching) -> dict[str, float]:
    """Precision, recall, f1 and their like over all samples."""
    _, reports = target.make_segments(samples, rollouts)
    return summarize(reports) | {"num_scenes": float(len(samples))}
