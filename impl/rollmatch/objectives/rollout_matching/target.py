"""From rollouts to segments, and what each rollout was worth: parse, match, append, correct. Needs no torch.

Matched numbers and descriptions of several tokens are corrected: each place gets the token that it should have held.
A wrong digit makes what follows it meaningless: behind the 4 of ``145`` no digit says anything about a true ``137``. So
a text is supervised from its first token up to and including the first one where it leaves the true text, and not
behind it. With ``y`` the sampled tokens from the text's first one, and ``u`` the tokens of the true text in its place,
up to the end of the token that holds the delimiter::

    m        = the first k with y[k] != u[k], or the last k where there is none
    label[k] = u[k]          for k <= m
    label[k] = unsupervised  for k > m

The delimiter counts: a number that ends too early leaves the true one there.

===========  ===========  ======================
sampled      true         labels
===========  ===========  ======================
``145,``     ``137,``     ``1 3``, then none
``13,``      ``137,``     ``1 3 7``
``1375,``    ``137,``     ``1 3 7 ,``, then none
``137,``     ``137,``     ``1 3 7 ,``
``sixty"``   ``six"``     ``six "``, then none
===========  ===========  ======================
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

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
from rollmatch.objectives.rollout_matching.match import MatchRules, match_objects
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.supervision import IGNORED, TransportRules, coordinate_targets
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


class Correction(NamedTuple):
    """Where a number or a description stands in a target, and what it should have been."""

    start: int
    """First byte."""
    end: int
    """Byte after the last one: the delimiter's first."""
    text: str
    is_desc: bool = False


class CorrectedToken(NamedTuple):
    """One token of a corrected text."""

    position: int
    """Index into the target's ids."""
    label: int
    """The token that should have stood there, or -100."""
    is_desc: bool


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


def label_corrections(
    target_ids: Sequence[int], corrections: Sequence[Correction], vocabulary: Vocabulary
) -> list[CorrectedToken]:
    """The tokens of these texts, ascending, as the texts are.

    ``target_ids`` are prefix and tail: where the delimiter's token is cut off the prefix, the tail holds it.
    """
    pieces = [vocabulary.piece(token_id) for token_id in target_ids]
    starts = list(accumulate(map(len, pieces), initial=0))
    text = b"".join(pieces)
    found: dict[int, CorrectedToken] = {}
    for start, end, wanted, is_desc in corrections:
        first = bisect_right(starts, start) - 1
        if first in found and found[first].label != target_ids[first]:
            continue  # the text before has left its truth in this very token
        after = _token_border(starts, end, text)
        true_text = text[starts[first] : start] + wanted.encode() + text[end : starts[after]]
        labels = _labels_of(target_ids[first:after], vocabulary.encode_bytes(true_text), first=first)
        found |= {position: CorrectedToken(position, label, is_desc) for position, label in labels.items()}
    return [found[position] for position in sorted(found)]


def _labels_of(sampled: Sequence[int], true: Sequence[int], *, first: int) -> dict[int, int]:
    """The rule at the top of this file, for one text whose first token is the target's ``first``.

    >>> _labels_of([1, 4, 5, 0], [1, 3, 7, 0], first=20)
    {20: 1, 21: 3, 22: -100, 23: -100}
    >>> _labels_of([1, 3, 0], [1, 3, 7, 0], first=20)
    {20: 1, 21: 3, 22: 7}
    >>> _labels_of([1, 3, 7, 5, 0], [1, 3, 7, 0], first=20)
    {20: 1, 21: 3, 22: 7, 23: 0, 24: -100}
    """
    pairs = zip(sampled, true, strict=False)
    leaves = next((place for place, (mine, wanted) in enumerate(pairs) if mine != wanted), len(true))
    return {first + place: true[place] if place <= leaves else IGNORED for place in range(len(sampled))}


def _token_border(starts: Sequence[int], byte: int, text: bytes) -> int:
    """The first token behind the one that holds ``byte`` that does not begin in mid-character.

    With tokens of 3, 1 and 2 bytes, byte 2 lies in the first one; the second begins with the second byte of an e acute:

    >>> _token_border([0, 3, 4, 6], 2, "1,\u00e9].".encode())
    2
    """
    after = bisect_right(starts, byte)
    while after < len(starts) - 1 and 0x80 <= text[starts[after]] < 0xC0:
        after += 1
    return after
