"""What passes between the packages: ids and plain lists, no tensors.

Shapes stand in brackets at the start of a field's line. ``bins`` are coordinate bins 0..999 (pixel
``x`` of a canvas ``W`` wide sits at bin ``x / (W - 1) * 999``). Positions are indices into the list they
name, never into a row, unless the field says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, groupby
from typing import Any

NUM_BINS = 1000
"""Coordinate bins; the last bin, 999, is the last pixel."""


def rounded(figure: float) -> float:
    """A figure as journals and pages show it: seconds, shares and advantages.

    >>> rounded(2 / 3)
    0.6667
    """
    return round(figure, 4)


class Geometry(StrEnum):
    """The two shapes an object may have; the value is its key in JSON."""

    BBOX = "bbox_2d"
    POLY = "poly"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundTruth:
    """A ground-truth object of a sample."""

    desc: str
    geometry: Geometry
    bins: tuple[int, ...]
    """[4] x1 y1 x2 y2 of a box, [2n] x y x y ... of a polygon, n >= 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line of a data set. Made by ``data``; the argument of reward functions."""

    sample_id: int
    """Position in the file, from 0; stable across epochs and resumes."""
    origin: str
    """``file:line``, for messages."""
    images: tuple[str, ...]
    """Absolute paths."""
    objects: tuple[GroundTruth, ...] = ()
    width: int = 0
    """Pixels; 0 if there is no image or the record does not have it."""
    height: int = 0
    messages: tuple[tuple[str, str], ...] = ()
    """(role, text) of its own chat, with ``<image>`` in place of images; empty: the configured prompts are used."""
    message_fields: tuple[Mapping[str, Any], ...] = ()
    """Further fields of each message for the chat template, such as tool_calls; empty: none."""
    has_text_prompt: bool = False
    """Whether the record had a prompt and no messages: rewards of others then get texts, else messages."""
    system: str | None = None
    """System message in place of the configured one, where the configured prompts are used; None: the configured."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of functions, for the chat template."""
    answer: Mapping[str, Any] | None = None
    """The assistant's message that is taught (answer_format text); None: the sample has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def chat(self) -> list[dict[str, Any]]:
        """Its own messages as chat templates take them.

        >>> called = Sample(sample_id=0, origin="x:1", images=(), messages=(("tool", "4"),),
        ...                 message_fields=({"tool_call_id": "a"},))
        >>> called.chat()
        [{'role': 'tool', 'content': '4', 'tool_call_id': 'a'}]
        """
        fields = self.message_fields or ({},) * len(self.messages)
        pairs = zip(self.messages, fields, strict=True)
        return [{"role": role, "content": text} | dict(further) for (role, text), further in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One prompt for the rollout side. Made by ``rollout.backend``, used by the backends."""

    request_id: str
    """Unique within a run: ``<optimizer step>.<rank>.<index>``."""
    sample: Sample
    prompt_token_ids: tuple[int, ...]
    """[P'] with one placeholder per image, as the chat template writes it (not expanded)."""
    seed: int
    """Never 0, which ms-swift reads as unset."""
    prefix_token_ids: tuple[int, ...] = ()
    """Response prefix to continue; the rollout then holds what follows it."""
    max_new_tokens: int | None = None
    """Longest rollout in tokens; None: that of the decoding."""
    policy_version: int | None = None
    """Version that wrote the response prefix; None where nothing is continued."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What an engine continues: the prompt, and the response so far."""
        return self.prompt_token_ids + self.prefix_token_ids

    def limit(self, max_new_tokens: int) -> int:
        """Longest rollout in tokens where the decoding says ``max_new_tokens``."""
        return max_new_tokens if self.max_new_tokens is None else self.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One response. Made by a backend, in the order of the requests; used by the objectives."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    """[P] as the engine saw it: image placeholders expanded."""
    response_token_ids: tuple[int, ...]
    """[R] exactly as sampled, the stop token trimmed."""
    stop_id: int | None
    """The stop token that ended it, as sampled; None: its limit did."""
    policy_version: int
    """Number of the sync whose weights generated this response; the oldest, where several did."""
    response_logprobs: tuple[float, ...] | None = None
    """[len(sampled_ids)] of each sampled token, under the distribution it was sampled from. None if not requested."""
    version_runs: tuple[tuple[int, int], ...] = ()
    """``policy_versions`` where there are several; empty: ``policy_version`` wrote all."""

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The response, and the stop token that ended it: what the policy wrote.

        >>> fields = {"request_id": "0", "prompt_token_ids": (1,), "response_token_ids": (7, 8), "policy_version": 1}
        >>> Rollout(**fields, stop_id=9).sampled_ids, Rollout(**fields, stop_id=None).sampled_ids
        ((7, 8, 9), (7, 8))
        """
        return self.response_token_ids if self.stop_id is None else (*self.response_token_ids, self.stop_id)

    @property
    def policy_versions(self) -> tuple[tuple[int, int], ...]:
        """Runs of (version, number of tokens that it wrote), in order; their numbers add up to all that was sampled."""
        return self.version_runs or ((self.policy_version, len(self.sampled_ids)),)

    @property
    def num_tokens(self) -> int:
        """R, as tokens of rollouts are counted: without the stop token."""
        return len(self.response_token_ids)

    @property
    def finish_reason(self) -> str:
        """``stop``: a stop token ended it. ``length``: its limit did."""
        return "length" if self.stop_id is None else "stop"


def joined_runs(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs of (version, number of tokens), neighbours of one version as one.

    >>> joined_runs([(3, 5), (3, 2), (4, 1), (3, 1)])
    [(3, 7), (4, 1), (3, 1)]
    """
    return [(version, sum(num for _, num in part)) for version, part in groupby(runs, lambda run: run[0])]


def cut_runs(runs: Sequence[tuple[int, int]], num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Runs of (version, number of tokens), of the first ``num_tokens`` tokens.

    >>> cut_runs([(3, 5), (4, 2), (5, 1)], 6), cut_runs([(3, 5), (4, 2)], 5), cut_runs([(3, 5)], 9)
    (((3, 5), (4, 1)), ((3, 5),), ((3, 5),))
    """
    ends = list(accumulate(num for _, num in runs))
    cut = [(version, min(num, num_tokens - end + num)) for (version, num), end in zip(runs, ends, strict=True)]
    return tuple((version, num) for version, num in cut if num > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedObject:
    """One valid object found in a response. Returned by ``parse_rollout``, used by match and append."""

    desc: str
    geometry: Geometry
    bins: tuple[int, ...]
    """[4] or [2n], read from coordinate token ids where the answer format has them, else from numbers."""
    positions: tuple[int, ...]
    """[len(bins)] indices of those tokens in the response (and so in the prefix); of a number its first token."""
    spans: tuple[tuple[int, int], ...] = ()
    """[len(bins)] first byte of each coordinate in the response, and the one after its last."""
    desc_span: tuple[int, int] = (0, 0)
    """First byte of the description in the response, quotes apart, and the one after its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRollout:
    """What a response holds. Returned by ``parse_rollout``, used by match and append."""

    prefix_token_ids: tuple[int, ...]
    """[X] ids of the response exactly as sampled, up to the cut; a token that the cut falls into is left out."""
    cut_head: bytes
    """That token's bytes before the cut, to be written again by the tail; empty where the cut is at a token border."""
    prefix_text: str
    """The append-ready text: the prefix ids' and the cut head's."""
    num_elements: int
    """Well-formed array elements inside the prefix, valid or not; 0 means append without a comma."""
    objects: tuple[PredictedObject, ...]
    """In order of appearance."""
    drops: Mapping[str, int]
    """Drop reason -> number of elements that were dropped as predictions."""
    truncated: bool
    """The response ended before its JSON did."""
    invalid: bool
    """Nothing parseable: no id is kept, the cut head is the opening, and every true object gets appended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Matches between predictions and ground truth. Made by ``objectives.rollout_matching.match``."""

    pairs: tuple[tuple[int, int], ...]
    """(prediction index, ground truth index), by prediction index."""
    ious: tuple[float, ...]
    """[len(pairs)] mask IoU of each pair."""
    false_positives: tuple[int, ...]
    """Unmatched predictions, by index: context without labels."""
    false_negatives: tuple[int, ...]
    """Unmatched ground truth, by index: appended in this order."""
    gating_rejections: int
    """Candidate pairs whose mask IoU was under the gate."""


TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens of one place with their log-probabilities, likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """What a teacher says of a segment's target tokens, lists of [L - P]."""

    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...]
    """Empty lists where none were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTarget:
    """What a policy gradient needs for the target tokens of a segment. Made by the objectives.

    Every list is [L - P], the target's tokens in order, stop token included.
    """

    advantages: tuple[float, ...]
    old_logprobs: tuple[float, ...] | None = None
    """Under the policy that the clipped ratio starts from; None: the policy as it is when it learns."""
    sampler_logprobs: tuple[float, ...] | None = None
    """As the rollout engine sampled them, to correct for its differing from the learner; None: no correction."""
    reference_logprobs: tuple[float, ...] | None = None
    """Under the policy before training; None where the distance to it costs nothing."""
    teacher_logprobs: tuple[float, ...] | None = None
    """Under the teacher; None: there is none."""
    teacher_top: tuple[TopLogprobs, ...] | None = None
    """The teacher's likeliest tokens at each place; None: they are not needed."""
    teacher_weight: float = 0.0
    is_masked: bool = False
    """Left out of the loss, but counted as a sequence."""
    is_written: tuple[bool, ...] | None = None
    """False for observations of an environment: not in the loss. None: the policy wrote everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One training sequence, never split by packing. Made by the objectives, used by ``learn``.

    ``token_ids`` is ``prompt + target``; the target is ``prefix + appended tail + EOS``.
    """

    sample: Sample
    policy_version: int
    token_ids: tuple[int, ...]
    """[L] prompt and target."""
    prompt_len: int
    """P; the target starts here."""
    prefix_len: int
    """X; the tail starts at P + X and ends at L. Before P + X only corrections of matched objects get labels."""
    coord_positions: tuple[int, ...] = ()
    """Indices into ``token_ids`` of coordinate slots of matched prefix objects, ascending."""
    coord_bins: tuple[int, ...] = ()
    """[len(coord_positions)] the bins these slots should have held (ground truth)."""
    desc_positions: tuple[int, ...] = ()
    """Indices into ``token_ids``, ascending, of tail tokens that overlap a ``desc`` value and of corrected tokens of
    descriptions."""
    corrected_positions: tuple[int, ...] = ()
    """Indices into ``token_ids`` of tokens of matched prefix objects' numbers and descriptions, ascending; a few may
    lie in the tail. In a chat: of what stands between two turns of the assistant."""
    corrected_labels: tuple[int, ...] = ()
    """[len(corrected_positions)] the token that should have stood there, or -100: it is not supervised."""
    policy: PolicyTarget | None = None
    """Set if the target is the rollout itself (policy gradient)."""

    @property
    def encoded_len(self) -> int:
        """L, prompt and target with EOS."""
        return len(self.token_ids)

    @property
    def train_len(self) -> int:
        """L - P, the target with EOS."""
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens of a segment that stand together in a row."""

    segment: int
    """Which of the row's segments."""
    first: int
    """Index in the segment of the first of these tokens."""
    end: int
    num_before: int = 0
    """Tokens of the shared prompt before them, which stand elsewhere in the row."""

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Segments in one sequence of a forward pass. Made by ``learn.pack``."""

    segments: tuple[Segment, ...]
    """In concatenation order; segment i starts at ``offsets[i]``."""
    capacity: int
    """``global_max_length``, for the fill ratio."""
    shares_prompts: bool = False
    """Whether neighbours with one prompt have it once, but for its last token, whose logits are each one's own."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """[S] ``encoded_len`` of each segment."""
        return tuple(segment.encoded_len for segment in self.segments)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What stands in the row, in order: whole segments, or a shared prompt and what each segment adds to it.

        Two segments with the prompt 5, 6, 7 make the row 5, 6 | 7, 1 | 7, 2, 3:

        >>> sample = Sample(sample_id=0, origin="x:1", images=())
        >>> def segment(*token_ids):
        ...     return Segment(sample=sample, policy_version=1, token_ids=token_ids, prompt_len=3, prefix_len=0)
        >>> row = Row(segments=(segment(5, 6, 7, 1), segment(5, 6, 7, 2, 3)), capacity=10, shares_prompts=True)
        >>> [(piece.segment, piece.first, piece.end, piece.num_before) for piece in row.pieces]
        [(0, 0, 2, 0), (0, 2, 4, 2), (1, 2, 5, 2)]
        """
        runs = [len(list(run)) for _, run in groupby(self.segments, _prompt_of)] if self.shares_prompts else ()
        pieces: list[Piece] = []
        for size in runs or [1] * len(self.segments):
            start = pieces[-1].segment + 1 if pieces else 0
            shared = self.segments[start].prompt_len - 1 if size > 1 else 0
            if shared > 0:
                pieces.append(Piece(segment=start, first=0, end=shared))
            members = enumerate(self.segments[start : start + size], start)
            pieces += [Piece(segment=i, first=shared, end=one.encoded_len, num_before=shared) for i, one in members]
        return tuple(pieces)

    @property
    def offsets(self) -> tuple[int, ...]:
        """[S] index in the row of each segment's first token, if it had its whole prompt before it: position p of the
        target, and of the logits before it, is at offset + p.

        >>> sample = Sample(sample_id=0, origin="x:1", images=())
        >>> def segment(length):
        ...     return Segment(sample=sample, policy_version=1, token_ids=(7,) * length, prompt_len=2, prefix_len=0)
        >>> segments = segment(3), segment(5), segment(4)
        >>> [Row(segments=segments, capacity=12, shares_prompts=shares).offsets for shares in (False, True)]
        [(0, 3, 8), (0, 2, 6)]
        """
        pieces = self.pieces
        starts = accumulate(map(len, pieces), initial=0)
        return tuple({piece.segment: start - piece.first for piece, start in zip(pieces, starts)}.values())

    @property
    def num_tokens(self) -> int:
        """T, tokens of the row."""
        return sum(map(len, self.pieces))

    @property
    def fill(self) -> float:
        """Share of the capacity that holds tokens, 0..1."""
        return self.num_tokens / self.capacity


def _prompt_of(segment: Segment) -> tuple[object, ...]:
    """What segments have alike that can share a prompt."""
    return segment.token_ids[: segment.prompt_len], segment.sample.images


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """What a segment (or a row of them) is to learn; plain lists. Made by ``objectives.rollout_matching``.

    Positions index the supervised token itself; its logit stands one place earlier.
    """

    labels: tuple[int, ...]
    """[T] token id where text is supervised by hard cross-entropy, -100 elsewhere."""
    weights: tuple[float, ...]
    """[T] weight of that label, 0.0 where there is none."""
    coord_positions: tuple[int, ...]
    """[K] indices of supervised coordinate slots, ascending."""
    coord_bins: tuple[int, ...]
    """[K] their true bins."""
