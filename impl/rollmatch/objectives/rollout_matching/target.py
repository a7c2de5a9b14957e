"""From rollouts to segments, and what each rollout was worth: parse, match, append, correct. Needs no torch."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollmatch.errors import TargetError
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.rollout_matching.answer_format import COORD_TOKENS, AnswerFormat
from rollmatch.objectives.rollout_matching.elements import (
    DescChangedByTokenizer,
    DescHoldsAddedToken,
    Tail,
    append_missed,
    check_descs,
)
from rollmatch.objectives.rollout_matching.match import (
    MatchRules,
    TransportRules,
    coordinate_targets,
    match_objects,
)
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.supervision import Correction, label_corrections
from rollmatch.records import GroundTruth, Matching, ParsedRollout, PredictedObject, Rollout, Sample, Segment

FormatOf = Callable[[Sample], AnswerFormat]
"""The answer format of a sample: that of a run, fitted to the sample's image."""


def fitted_format(answer_format: AnswerFormat, image_size: Callable[[Sample], tuple[int, int]]) -> FormatOf:
    """The format of each sample: in pixels, that of its image as the model gets it (width, height)."""

    def format_of(sample: Sample) -> AnswerFormat:
        return answer_format.fitted(*image_size(sample)) if answer_format.in_pixels else answer_format

    return format_of


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedRollout:
    """A response as it was parsed, and the true objects that its objects stand for. Made by ``RolloutMatching``."""

    answer_format: AnswerFormat
    parsed: ParsedRollout
    truth: tuple[GroundTruth, ...]
    """The sample's objects, in shapes that the format has."""
    matching: Matching

    @property
    def pairs(self) -> list[tuple[PredictedObject, GroundTruth]]:
        """Matched predictions in order, each with its true object."""
        return [(self.parsed.objects[index], self.truth[partner]) for index, partner in self.matching.pairs]


class RolloutMatching:
    """Rollouts in, segments out. Errors: ``RolloutsMisaligned`` and those of parse and append."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        match_rules: MatchRules,
        transport_rules: TransportRules,
        format_of: FormatOf = lambda sample: COORD_TOKENS,
        *,
        corrects_descs: bool = False,
    ) -> None:
        """``corrects_descs``: whether descriptions of matched objects are taught, too."""
        self.vocabulary = vocabulary
        self.match_rules = match_rules
        self.transport_rules = transport_rules
        self.format_of = format_of
        self.corrects_descs = corrects_descs

    def make_segments(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout]
    ) -> tuple[list[Segment], list[RolloutReport]]:
        """One segment and one report per sample, in order; errors about a description name the sample's origin."""
        if len(samples) != len(rollouts):
            raise RolloutsMisaligned(f"{len(samples)} samples, {len(rollouts)} rollouts", key="rollouts")
        made = [self._make_segment(sample, rollout) for sample, rollout in zip(samples, rollouts, strict=True)]
        return [segment for segment, _ in made], [report for _, report in made]

    def match(self, sample: Sample, rollout: Rollout) -> MatchedRollout:
        """Parse a response and match its objects with the true ones."""
        answer_format = self.format_of(sample)
        parsed = parse_rollout(rollout.response_token_ids, self.vocabulary, answer_format)
        truth = tuple(answer_format.shaped(each) for each in sample.objects)
        matching = match_objects(parsed.objects, truth, self.match_rules)
        return MatchedRollout(answer_format=answer_format, parsed=parsed, truth=truth, matching=matching)

    def _make_segment(self, sample: Sample, rollout: Rollout) -> tuple[Segment, RolloutReport]:
        matched = self.match(sample, rollout)
        prefix_ids, tail = matched.parsed.prefix_token_ids, self._append(sample, matched)
        prompt_len, prefix_len = len(rollout.prompt_token_ids), len(prefix_ids)
        slots = self._slots(matched) if matched.answer_format.uses_tokens else []
        corrected = label_corrections((*prefix_ids, *tail.token_ids), self._corrections(matched), self.vocabulary)
        descs = {prefix_len + position for position in tail.desc_positions}
        descs |= {token.position for token in corrected if token.is_desc}
        segment = Segment(
            sample=sample,
            policy_version=rollout.policy_version,
            token_ids=(*rollout.prompt_token_ids, *prefix_ids, *tail.token_ids),
            prompt_len=prompt_len,
            prefix_len=prefix_len,
            coord_positions=tuple(prompt_len + position for position, _ in slots),
            coord_bins=tuple(coord_bin for _, coord_bin in slots),
            desc_positions=tuple(prompt_len + position for position in sorted(descs)),
            corrected_positions=tuple(prompt_len + token.position for token in corrected),
            corrected_labels=tuple(token.label for token in corrected),
        )
        return segment, _make_report(rollout, matched)

    def _append(self, sample: Sample, matched: MatchedRollout) -> Tail:
        missed = [matched.truth[index] for index in matched.matching.false_negatives]
        try:
            if self.corrects_descs:
                check_descs([true for _, true in matched.pairs], self.vocabulary)
            return append_missed(matched.parsed, missed, self.vocabulary, matched.answer_format)
        except (DescHoldsAddedToken, DescChangedByTokenizer) as error:
            raise type(error)(error.problem, key=sample.origin, remedy=error.remedy) from error

    def _slots(self, matched: MatchedRollout) -> list[tuple[int, int]]:
        """(index in the prefix, true bin) of the slots of matched objects, ascending, as objects are in order."""
        slots: list[tuple[int, int]] = []
        for predicted, true in matched.pairs:
            slots.extend(zip(predicted.positions, self._bins(predicted, true), strict=True))
        return slots

    def _corrections(self, matched: MatchedRollout) -> list[Correction]:
        """Numbers of several tokens, and descriptions where they are taught, of matched objects; ascending."""
        corrections: list[Correction] = []
        for predicted, true in matched.pairs:
            if not matched.answer_format.uses_tokens:
                wanted = matched.answer_format.numbers_of(predicted.geometry, self._bins(predicted, true))
                spans = zip(predicted.spans, map(str, wanted), strict=True)
                corrections += [Correction(*span, text) for span, text in spans]
            if self.corrects_descs:
                text = json.dumps(true.desc, ensure_ascii=False)[1:-1]
                corrections.append(Correction(*predicted.desc_span, text, is_desc=True))
        return sorted(corrections)

    def _bins(self, predicted: PredictedObject, true: GroundTruth) -> tuple[int, ...]:
        return coordinate_targets(predicted, true, self.transport_rules)


def _make_report(rollout: Rollout, matched: MatchedRollout) -> RolloutReport:
    parsed, matching = matched.parsed, matched.matching
    return RolloutReport(
        num_predicted=len(parsed.objects),
        num_truth=len(matched.truth),
        num_matched=len(matching.pairs),
        num_desc_correct=sum(predicted.desc == true.desc for predicted, true in matched.pairs),
        iou_sum=sum(matching.ious),
        drops=parsed.drops,
        invalid=parsed.invalid,
        truncated=parsed.truncated,
        response_len=len(rollout.response_token_ids),
        prefix_len=len(parsed.prefix_token_ids),
        appended=len(matching.false_negatives),
        gating_rejections=matching.gating_rejections,
    )
