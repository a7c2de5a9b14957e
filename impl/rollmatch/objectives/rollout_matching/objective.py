"""Rollout matching: what the model found is kept and corrected in place, what it missed is appended.

Per sample: parse the response, match its objects with the true ones, teach matched slots the true bins, append the
missed objects. False positives stay as context without labels.

Distillation is a maker of the same protocol, and shares no more with this one: it judges the tokens that were sampled,
with a distribution for each (``PolicyTarget``). Here the target has other tokens than the rollout, few of them are
labelled, and soft labels lie over bins of coordinates. A record for both would leave either's fields empty.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rollmatch.data import Reuse
from rollmatch.learn.batch import MicroBatch
from rollmatch.learn.head import Logits
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.protocol import Evaluated, ObjectiveContext, TrainingTargets
from rollmatch.objectives.rollout_matching.answer_format import DropReason
from rollmatch.objectives.rollout_matching.loss import (
    LossRules,
    LossTerms,
    LossTotals,
    count_totals,
    logit_indices,
    masked_loss,
    masked_loss_of_kept,
)
from rollmatch.objectives.rollout_matching.supervision import IGNORED, BinOf, MaskRules, mask_segments
from rollmatch.objectives.rollout_matching.target import MatchedRollout, RolloutMatching, RolloutReport
from rollmatch.records import Rollout, Sample, Segment, Supervision


@dataclass(frozen=True, kw_only=True)
class LabelledTokens:
    """The loss of objectives that teach labelled tokens."""

    mask_rules: MaskRules
    loss_rules: LossRules
    bin_of: BinOf
    reuse: ClassVar[Reuse] = Reuse()
    wants_logprobs: ClassVar[bool] = False

    def supervise(self, segments: Sequence[Segment], *, starts: Sequence[int], num_tokens: int) -> Supervision:
        """Prefix slots and the tail. Errors: as ``mask_segments``."""
        return mask_segments(segments, starts=starts, num_tokens=num_tokens, rules=self.mask_rules, bin_of=self.bin_of)

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


@dataclass(frozen=True, kw_only=True)
class RolloutMatchingObjective(LabelledTokens):
    """``trainer_variant: rollout_matching_sft``."""

    target: RolloutMatching
    eval_target: RolloutMatching
    term_names: ClassVar[tuple[str, ...]] = ("loss_ce", "loss_coord")

    def make_segments(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext
    ) -> TrainingTargets:
        """One segment and one report per sample."""
        segments, reports = self.target.make_segments(samples, rollouts)
        return TrainingTargets(segments=tuple((segment,) for segment in segments), reports=tuple(reports))

    def summarize(self, reports: Sequence[RolloutReport]) -> dict[str, float]:
        """Rates and means, and the number of objects that were appended."""
        return summarize(reports) | {"appended": float(sum(report.appended for report in reports))}

    def evaluate(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext) -> Evaluated:
        """Matched at the gate of evaluations; every scene is described."""
        target = self.eval_target
        scenes: list[dict[str, object]] = [
            describe_scene(sample, rollout, target.match(sample, rollout), target.vocabulary)
            for sample, rollout in zip(samples, rollouts, strict=True)
        ]
        record = {"iou_threshold": target.match_rules.maskiou_gate, "scenes": scenes}
        _, reports = target.make_segments(samples, rollouts)
        metrics = summarize(reports) | {"num_scenes": float(len(samples))}
        return Evaluated(metrics=metrics, record=record, parts=parts_of(reports))


class SupervisedObjective(RolloutMatchingObjective):
    """``trainer_variant: sft``: the same target, masks and loss. Responses are empty, so all objects are appended."""

    def summarize(self, reports: Sequence[RolloutReport]) -> dict[str, float]:
        """How many true objects were taught: an empty response has no quality."""
        return {"appended": float(sum(report.appended for report in reports))}

    def evaluate(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext) -> Evaluated:
        """As rollout matching, and ``loss``: the mean negative log-probability of the true answers' tokens."""
        judged = super().evaluate(samples, rollouts, context)
        empty = [replace(rollout, response_token_ids=(), response_logprobs=None) for rollout in rollouts]
        segments, _ = self.target.make_segments(samples, empty)
        loss, parts = validation_loss(segments, context)
        return replace(judged, metrics={"loss": loss, **judged.metrics}, parts={"loss": parts, **judged.parts})


def validation_loss(segments: Sequence[Segment], context: ObjectiveContext) -> tuple[float, list[tuple[float, float]]]:
    """Mean negative log-probability of the segments' labelled tokens; of each segment its sum and their number.

    All ranks have the same segments, and each scores some of them.
    """
    ranks, places = context.ranks, range(context.ranks.rank, len(segments), context.ranks.learner_world_size)
    scores = context.score([segments[place] for place in places])
    mine = {place: _nll(segments[place], logprobs) for place, logprobs in zip(places, scores, strict=True)}
    parts = [part for _, part in sorted(one for each in ranks.gather(mine) for one in each.items())]
    count = sum(each for _, each in parts)
    return sum(part for part, _ in parts) / count if count else 0.0, parts


def _nll(segment: Segment, logprobs: Sequence[float]) -> tuple[float, float]:
    unlabelled = {
        position - segment.prompt_len
        for position, label in zip(segment.corrected_positions, segment.corrected_labels, strict=True)
        if label == IGNORED
    }
    kept = [logprob for place, logprob in enumerate(logprobs) if place not in unlabelled]
    return -sum(kept), float(len(kept))


def describe_scene(sample: Sample, rollout: Rollout, matched: MatchedRollout, vocabulary: Vocabulary) -> dict[str, Any]:
    """One scene as the report draws it: truth, predictions with their partners, and the raw answer."""
    parsed, matching = matched.parsed, matched.matching
    partners = {mine: (true, iou) for (mine, true), iou in zip(matching.pairs, matching.ious, strict=True)}
    truth = [{"desc": o.desc, "geometry": o.geometry.value, "bins": list(o.bins)} for o in matched.truth]
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


RATES: Mapping[str, Callable[[RolloutReport], tuple[float, float]]] = {
    "precision": lambda one: (one.num_matched, one.num_predicted),
    "recall": lambda one: (one.num_matched, one.num_truth),
    "f1": lambda one: (2 * one.num_matched, one.num_predicted + one.num_truth),
    "f1_desc": lambda one: (2 * one.num_desc_correct, one.num_predicted + one.num_truth),
    "mean_iou": lambda one: (one.iou_sum, one.num_matched),
    "invalid_rate": lambda one: (one.invalid, 1),
    "malformed_rate": lambda one: (sum(one.drops.values()), sum(one.drops.values()) + one.num_predicted),
    "truncated_rate": lambda one: (one.truncated, 1),
}
"""Figure -> what a rollout adds to its numerator and to its denominator."""


def parts_of(reports: Sequence[RolloutReport]) -> dict[str, list[tuple[float, float]]]:
    """Of each figure in ``RATES``, what each rollout adds to it."""
    return {name: [parts(report) for report in reports] for name, parts in RATES.items()}


def summarize(reports: Sequence[RolloutReport]) -> dict[str, float]:
    """Figures of many rollouts; the same keys whatever they hold, every ``drop/<reason>`` included.

    Counts are summed first, then divided: a scene without truth and without prediction adds nothing, f1 is
    ``2 matched / (predicted + truth)``. 0/0 is 0.0: where nothing was shown, nothing was earned.
    ``f1_desc`` counts a match only if its description is right, ``mean_iou`` is over matched pairs, ``malformed_rate``
    over written objects, the other rates over rollouts.
    """
    drops = {f"drop/{reason}": float(sum(r.drops.get(reason, 0) for r in reports)) for reason in DropReason}
    return {name: _ratio(parts) for name, parts in parts_of(reports).items()} | drops


def _ratio(parts: Sequence[tuple[float, float]]) -> float:
    whole = sum(each for _, each in parts)
    return sum(part for part, _ in parts) / whole if whole else 0.0
