"""The text of a served answer as objects in pixels of the image."""

import re
from collections.abc import Iterable

from rollmatch.data.formats import LabeledObject
from rollmatch.data.formats.native import labeled
from rollmatch.errors import ConfigError
from rollmatch.objectives.rollout_matching.answer_format import ANSWER_FORMATS, AnswerFormat
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.records import NUM_BINS

_COORD_TOKEN = re.compile(r"(<\|coord_(?:0|[1-9]\d{0,2})\|>)")


class _TextPieces:
    """A text as a vocabulary of its own parts: token i is part i, and every second part is a coordinate token."""

    control_ids = ()

    def __init__(self, text: str) -> None:
        self.parts = _COORD_TOKEN.split(text)
        self.ids = [place for place, part in enumerate(self.parts) if part]

    def piece(self, token_id: int) -> bytes:
        return self.parts[token_id].encode()

    def decode(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(map(self.piece, token_ids))

    def bin_of(self, token_id: int) -> int | None:
        return int(self.parts[token_id][len("<|coord_") : -len("|>")]) if token_id % 2 else None


def parse_answer(
    answer: str,
    width: int,
    height: int,
    answer_format: str | AnswerFormat = "coord_tokens",
    *,
    seen_size: tuple[int, int] | None = None,
) -> list[LabeledObject]:
    """The objects of an answer of a served model, with ``desc``, ``box`` [x1, y1, x2, y2] and ``polygon`` [x, y, ...].

    ``answer``: the message's content. ``width``, ``height``: pixels of the image, in which boxes are returned; they are
    read in bins of 1/999 of them. ``answer_format``: that of training. ``seen_size``: (width, height) of the image
    after the processor has resized it; ``qwen2_5_vl`` writes its pixels.
    Objects with an error are left out, as in training and evaluation; no list at all gives no objects.
    Errors: ``ConfigError`` with ``not-a-choice``, ``missing-key``, ``argument-not-used``.

    >>> corners = '"<|coord_0|>", "<|coord_0|>", "<|coord_999|>", "<|coord_333|>"'
    >>> found = parse_answer(f'{{"objects": [{{"desc": "cat", "bbox_2d": [{corners}]}}]}}', width=101, height=202)
    >>> [(one.desc, one.box) for one in found]
    [('cat', (0.0, 0.0, 100.0, 67.0))]
    >>> parse_answer('[{"bbox_2d": [0, 0, 500, 1000], "label": "cat"}]', 101, 201, "qwen3_vl")
    []
    """
    found = ANSWER_FORMATS.get(answer_format) if isinstance(answer_format, str) else answer_format
    if found is None:
        remedy = f"Name one of {', '.join(ANSWER_FORMATS)}, or pass an AnswerFormat."
        raise ConfigError(f"is {answer_format!r}", code="not-a-choice", key="answer_format", remedy=remedy)
    if found.in_pixels != (seen_size is not None):
        if seen_size is None:
            remedy = "Pass (width, height) after the processor's resizing: image_grid_thw times patch_size."
            raise ConfigError(
                "is missing: coordinates are its pixels", code="missing-key", key="seen_size", remedy=remedy
            )
        remedy = "Leave it out: coordinates do not depend on it."
        raise ConfigError("is not used", code="argument-not-used", key="seen_size", remedy=remedy)
    pieces = _TextPieces(answer)
    parsed = parse_rollout(pieces.ids, pieces, found.fitted(*(seen_size or (NUM_BINS, NUM_BINS))))
    return [labeled({"desc": one.desc, one.geometry.value: one.bins}, (width, height)) for one in parsed.objects]
