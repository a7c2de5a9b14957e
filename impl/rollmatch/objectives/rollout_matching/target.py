"""From rollouts to segments, and what each rollout was worth: parse, match, append, correct. Needs no torch.

The tail that is written (missed objects, closing, stop token) has the ids that the model would use by itself: those of
prefix and tail tokenised together. It begins with the cut head, the kept bytes of a token that the cut fell into: where
the model wrote ``"]}]}`` too early, the label in that very place is ``"]}, {"``. Tokens of punctuation at the prefix's
end that the tokenizer would merge otherwise move into the tail, too: Qwen3 closes by ``]}`` and ``]}``, and continues
by ``]},`` and `` {"``. Without that, continuing or closing would never be taught. All other ids of the rollout stay
as sampled.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rollmatch.errors import ConfigError, TargetError
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.rollout_matching.answer_format import COORD_TOKENS, AnswerFormat
from rollmatch.objectives.rollout_matching.match import MatchRules, TransportRules, coordinate_targets, match_objects
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.supervision import Correction, label_corrections
from rollmatch.records import Geometry, GroundTruth, Matching, ParsedRollout, PredictedObject, Rollout, Sample, Segment

FormatOf = Callable[[Sample], AnswerFormat]
"""The answer format of a sample: that of a run, fitted to the sample's image."""


def fitted_format(answer_format: AnswerFormat, image_size: Callable[[Sample], tuple[int, int]]) -> FormatOf:
    """The format of each sample: in pixels, that of its image as the model gets it (width, height)."""

    def format_of(sample: Sample) -> AnswerFormat:
        return answer_format.fitted(*image_size(sample)) if answer_format.in_pixels else answer_format

    return format_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """What one rollout was worth. Made here, used by ``summarize``, ``training`` and ``report``."""

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


class DescHoldsAddedToken(TargetError):
    """A description spells an added token: it would stop the answer, or claim a coordinate."""

    code = "desc-holds-added-token"


class DescChangedByTokenizer(TargetError):
    """A description does not come out of the tokenizer as it went in (a normalizer may rewrite it)."""

    code = "desc-changed-by-tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What follows the prefix. Made by ``append_missed``, used by ``rollout_matching``."""

    num_kept: int
    """Ids of the prefix that stay; the tail writes the bytes of the others again."""
    token_ids: tuple[int, ...]
    """[N] bytes of the prefix's other ids, cut head and text, tokenised behind those that stay; then the stop token."""
    text: str
    """What is appended to the prefix text; without cut head and stop token."""
    desc_positions: tuple[int, ...]
    """Indices into ``token_ids`` of tokens that hold any byte of a description's content, ascending."""


def serialize_objects(objects: Iterable[GroundTruth], answer_format: AnswerFormat = COORD_TOKENS) -> str:
    """The whole answer for these objects.

    >>> from rollmatch.records import Geometry
    >>> print(serialize_objects([GroundTruth(desc="leaf", geometry=Geometry.POLY, bins=(1, 2, 9, 2, 9, 8))]))
    ... # doctest: +ELLIPSIS
    {"objects": [{"desc": "leaf", "poly": ["<|coord_1|>", "<|coord_2|>", ... "<|coord_8|>"]}]}
    """
    written = [answer_format.write(answer_format.shaped(each)) for each in objects]
    return answer_format.opening + "".join(answer_format.join(written, follows=False))


def append_missed(
    parsed: ParsedRollout,
    missed: Sequence[GroundTruth],
    vocabulary: Vocabulary,
    answer_format: AnswerFormat = COORD_TOKENS,
) -> Tail:
    """The tail that completes a prefix: a comma if needed, the missed objects in order, the closing, the stop token.

    Errors: ``DescHoldsAddedToken``, ``DescChangedByTokenizer`` (``key`` is ``missed[index].desc``),
    ``cut-head-not-encodable``.
    """
    check_descs(missed, vocabulary)
    parts = [answer_format.write(answer_format.shaped(each)) for each in missed]
    before, after = answer_format.join(parts, follows=parsed.num_elements > 0)
    num_kept, token_ids = _join(parsed, (before + after).encode(), vocabulary)
    rewritten = vocabulary.decode(parsed.prefix_token_ids[num_kept:]) + parsed.cut_head
    within = [answer_format.desc_span(each.desc, part) for each, part in zip(missed, parts, strict=True)]
    lens = [len((part + answer_format.between).encode()) for part in parts]
    firsts = accumulate(lens, initial=len(rewritten) + len(before.encode()))
    spans = [(first + start, first + end) for first, (start, end) in zip(firsts, within, strict=False)]
    starts = list(accumulate((len(vocabulary.piece(token_id)) for token_id in token_ids), initial=0))
    return Tail(
        num_kept=num_kept,
        token_ids=(*token_ids, vocabulary.stop_id),
        text=before + after,
        desc_positions=tuple(tokens_in(spans, starts)),
    )


def check_exact(vocabulary: Vocabulary, answer_format: AnswerFormat) -> None:
    """Raise ``tokenizer-changes-answers`` unless an answer's tokens stand for exactly its bytes."""
    shown = [("A dog's caf\u00e9", (12, 40, 310, 505)), ("cat", (1, 2, 30, 999))]
    objects = [GroundTruth(desc=desc, geometry=Geometry.BBOX, bins=bins) for desc, bins in shown]
    answer = serialize_objects(objects, answer_format.fitted(1000, 1000))
    if not vocabulary.is_exact(answer):
        raise ConfigError(
            f"the tokenizer does not give back {answer!r}",
            code="tokenizer-changes-answers",
            key="model.model",
            remedy="Use a model of byte-level BPE or byte fallback, or learn from rewards, which read text.",
        )


_PUNCTUATION = frozenset(b'"[]{}:,` \t\r\n')
"""What tokens at the joint may hold: a token with anything else stays in the prefix as it was sampled."""


def _join(parsed: ParsedRollout, text: bytes, vocabulary: Vocabulary) -> tuple[int, tuple[int, ...]]:
    """How many ids of the prefix stay, and the ids of the tail's bytes behind them.

    As many as end at a border of the whole text's own tokens; all, and a tail tokenised alone, where there is no such
    border among the punctuation at the prefix's end.
    """
    ids, raw = parsed.prefix_token_ids, vocabulary.decode(parsed.prefix_token_ids)
    whole = vocabulary.encode_bytes(raw + parsed.cut_head + text)
    pieces = [vocabulary.piece(token_id) for token_id in whole]
    if b"".join(pieces) == raw + parsed.cut_head + text:
        borders = {byte: place for place, byte in enumerate(accumulate(map(len, pieces), initial=0))}
        kept, end = len(ids), len(raw)
        while end not in borders and _PUNCTUATION.issuperset(vocabulary.piece(ids[kept - 1])):
            kept -= 1
            end -= len(vocabulary.piece(ids[kept]))
        if end in borders:
            return kept, whole[borders[end] :]
    return len(ids), _encode(parsed.cut_head + text, vocabulary)


def _encode(raw: bytes, vocabulary: Vocabulary) -> tuple[int, ...]:
    token_ids = vocabulary.encode_bytes(raw)
    if vocabulary.decode(token_ids) != raw:
        raise TargetError(
            f"{raw!r} is tokenised as {vocabulary.decode(token_ids)!r}",
            code="cut-head-not-encodable",
            key="cut_head",
            remedy="Use a tokenizer whose normalizer leaves such text alone.",
        )
    return token_ids


def check_descs(objects: Sequence[GroundTruth], vocabulary: Vocabulary) -> None:
    """Raise ``DescHoldsAddedToken`` or ``DescChangedByTokenizer``; ``key`` is ``missed[index].desc``."""
    for index, each in enumerate(objects):
        quoted = json.dumps(each.desc, ensure_ascii=False)
        token_ids = vocabulary.encode_bytes(quoted.encode())
        key = f"missed[{index}].desc"
        for token_id in token_ids:
            if token_id in vocabulary.control_ids or vocabulary.bin_of(token_id) is not None:
                raise DescHoldsAddedToken(
                    f"{quoted} holds the added token {vocabulary.piece(token_id).decode()}",
                    key=key,
                    remedy="Take the literal out of the description.",
                )
        if vocabulary.decode(token_ids) != quoted.encode():
            raise DescChangedByTokenizer(
                f"{quoted} is tokenised as {vocabulary.decode(token_ids).decode(errors='replace')}",
                key=key,
                remedy="Store the description as the tokenizer writes it (Qwen: Unicode NFC).",
            )


def tokens_in(spans: Iterable[tuple[int, int]], starts: Sequence[int]) -> list[int]:
    """Tokens that share a byte with a span, ascending; ``starts`` are the tokens' first bytes and the whole length.

    Tokens of 3, 2 and 4 bytes; bytes 4 and 5 lie in the second and the third:

    >>> tokens_in([(4, 6)], [0, 3, 5, 9])
    [1, 2]
    >>> tokens_in([(0, 3), (3, 5)], [0, 3, 5, 9])
    [0, 1]
    """
    touched = (range(bisect_right(starts, low) - 1, bisect_left(starts, high)) for low, high in spans)
    return sorted({token for tokens in touched for token in tokens})


class RolloutMatching:
    """Rollouts in, segments out. Errors: ``rollouts-misaligned``, and those of ``append_missed``."""

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
            problem = f"{len(samples)} samples, {len(rollouts)} rollouts; each sample has one, in the same order"
            raise TargetError(problem, code="rollouts-misaligned", key="rollouts")
        made = [self._make_segment(sample, rollout) for sample, rollout in zip(samples, rollouts)]
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
        tail = self._append(sample, matched)
        prefix_ids = matched.parsed.prefix_token_ids[: tail.num_kept]
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
        return segment, _make_report(rollout, matched, prefix_len=prefix_len)

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


def _make_report(rollout: Rollout, matched: MatchedRollout, *, prefix_len: int) -> RolloutReport:
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
        prefix_len=prefix_len,
        appended=len(matching.false_negatives),
        gating_rejections=matching.gating_rejections,
    )
