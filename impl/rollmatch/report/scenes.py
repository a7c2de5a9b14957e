"""Validation scenes before and after training: which to show, their images, and what to draw on them."""

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from rollmatch.data.image import check_regular, rgb_of
from rollmatch.records import NUM_BINS, Geometry
from rollmatch.report.evaluations import Evaluation, Outline, Prediction, Scene
from rollmatch.report.numbers import finite

LONGEST_SIDE = 640
"""Larger images are scaled down to this many pixels: their boxes stay where they are, in relative terms."""
FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
MAX_BYTES = 100_000
"""Of an image on the page; a larger file is written again, smaller."""


def embed(path: Path) -> str | None:
    """A ``data:`` URL; None where there is no such file or it is no image, which the page says in its place."""
    try:
        check_regular(path)
        raw = path.read_bytes()
        with Image.open(io.BytesIO(raw)) as image:
            image.load()  # a truncated file is found out here, not by the browser
            if image.format in FORMATS and len(raw) <= MAX_BYTES and max(image.size) <= LONGEST_SIDE:
                return _data_url(raw, FORMATS[image.format])
            shown, smaller = rgb_of(image), io.BytesIO()
            shown.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            shown.save(smaller, format="JPEG", quality=85)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return _data_url(smaller.getvalue(), "image/jpeg")


def _data_url(raw: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(raw).decode('ascii')}"


MAX_SCENES = 24
MAX_WORST = 8
"""Places kept for the lowest scores after training, so that the gallery cannot only flatter."""
PIXELATED_UP_TO = 320
"""Longest side in pixels up to which an image is enlarged with hard pixel edges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One outline with its label. ``role``: found truth, missed truth, matched or unmatched prediction."""

    role: str
    points: str
    """SVG polygon points in pixels of the scene's canvas."""
    label: str
    """Empty where another mark's label says it."""
    title: str
    left_percent: float
    top_percent: float
    bottom_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One answer of the model, drawn on the image."""

    when: str
    step: int
    summary: str
    marks: tuple[Mark, ...]
    response_text: str
    invalid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One scene with one or two panels. ``gain`` orders the gallery; ``worst`` ranks from the bottom, from 0."""

    sample_id: str
    width: int
    height: int
    pixelated: bool
    image_url: str | None
    image: str
    panels: tuple[Panel, ...]
    scores: tuple[float, ...]
    gain: float | None
    worst: int

    @property
    def gain_class(self) -> str:
        """Style class of the gain: ``better``, ``worse`` or ``same``."""
        return "same" if not self.gain else "better" if self.gain > 0 else "worse"


def make_cards(before: Evaluation, after: Evaluation | None, *, run_dir: Path) -> tuple[Card, ...]:
    """Up to ``MAX_SCENES`` cards, largest improvement first (file order where there is nothing to compare)."""
    answers = _paired(before, after)
    chosen = _choose([tuple(scene.f1 for _, scene in answer) for answer in answers])
    worst_first = sorted(chosen, key=lambda place: (answers[place][-1][1].f1, place))
    ranks = {place: rank for rank, place in enumerate(worst_first)}
    return tuple(_card(answers[place], worst=ranks[place], run_dir=run_dir) for place in chosen)


def image_path(image: str, run_dir: Path) -> Path:
    """As written if that exists, else inside the run directory."""
    path = Path(image)
    return path if path.is_absolute() or os.path.isfile(path) else run_dir / path


def to_pixels(bins: Sequence[int], *, width: int, height: int) -> list[tuple[float, float]]:
    """Bins x y x y ... as pixels: bin k of a canvas W wide is pixel k / 999 * (W - 1).

    >>> to_pixels([0, 999, 999, 333], width=4, height=7)
    [(0.0, 6.0), (3.0, 2.0)]
    """
    last_bin = NUM_BINS - 1
    return [
        (round(x / last_bin * (width - 1), 2), round(y / last_bin * (height - 1), 2))
        for x, y in zip(bins[::2], bins[1::2])
    ]


Answer = list[tuple[int, Scene]]


def _paired(before: Evaluation, after: Evaluation | None) -> list[Answer]:
    """Per sample its answers as (step, scene), earlier first; samples seen only once are left out."""
    if after is None:
        return [[(before.step, scene)] for scene in before.scenes]
    later = {scene.sample_id: scene for scene in after.scenes}
    return [
        [(before.step, scene), (after.step, later[scene.sample_id])]
        for scene in before.scenes
        if scene.sample_id in later
    ]


def _choose(scores: Sequence[tuple[float, ...]]) -> list[int]:
    """Places of the scenes to show: the most improved, with places kept for the worst.

    >>> _choose([(0.5, 0.5), (0.0, 1.0), (0.9, 0.2)])
    [1, 0, 2]
    """
    by_gain = sorted(range(len(scores)), key=lambda place: scores[place][0] - scores[place][-1])
    if len(by_gain) <= MAX_SCENES:
        return by_gain
    worst = set(sorted(by_gain, key=lambda place: scores[place][-1])[:MAX_WORST])
    best = [place for place in by_gain if place not in worst][: MAX_SCENES - MAX_WORST]
    return [place for place in by_gain if place in worst or place in best]


def _card(answer: Answer, *, worst: int, run_dir: Path) -> Card:
    scene = answer[0][1]
    scores = tuple(one.f1 for _, one in answer)
    whens = ("Before", "After") if len(answer) > 1 else ("Answer",)
    return Card(
        sample_id=str(scene.sample_id),
        width=scene.width,
        height=scene.height,
        pixelated=max(scene.width, scene.height) <= PIXELATED_UP_TO,
        image_url=embed(image_path(scene.image, run_dir)),
        image=scene.image,
        panels=tuple(_panel(one, when=when, step=step) for when, (step, one) in zip(whens, answer)),
        scores=scores,
        gain=round(scores[-1] - scores[0], 4) if len(scores) > 1 else None,
        worst=worst,
    )


def _panel(scene: Scene, *, when: str, step: int) -> Panel:
    num_unmatched = sum(prediction.partner is None for prediction in scene.predicted)
    found = f"{len(scene.partners)} of {len(scene.truth)} found"
    return Panel(
        when=when,
        step=step,
        summary=f"{found}, {num_unmatched} wrong" if num_unmatched else found,
        marks=_marks(scene),
        response_text=scene.response_text,
        invalid=scene.invalid,
    )


def _marks(scene: Scene) -> tuple[Mark, ...]:
    truths = [_truth_mark(truth, scene, found=place in scene.partners) for place, truth in enumerate(scene.truth)]
    return (*truths, *(_prediction_mark(prediction, scene) for prediction in scene.predicted))


def _truth_mark(truth: Outline, scene: Scene, *, found: bool) -> Mark:
    if found:
        return _mark(truth, scene, role="found", label="", title=f"truth: {truth.desc}")
    return _mark(truth, scene, role="missed", label=truth.desc, title=f"missed: {truth.desc}")


def _prediction_mark(prediction: Prediction, scene: Scene) -> Mark:
    score = finite(prediction.score)
    sure = "" if score is None else f", score {score:.2f}"
    if prediction.partner is None:
        title = f"no true object: {prediction.desc}{sure}"
        return _mark(prediction, scene, role="unmatched", label=prediction.desc, title=title)
    true_desc = scene.truth[prediction.partner].desc
    named = prediction.desc if prediction.desc == true_desc else f"{prediction.desc} (is {true_desc})"
    iou = finite(prediction.iou)
    label = named if iou is None else f"{named} {iou:.2f}"
    return _mark(prediction, scene, role="matched", label=label, title=f"matched: {label}{sure}")


def _mark(outline: Outline, scene: Scene, *, role: str, label: str, title: str) -> Mark:
    corners = to_pixels(outline.bins, width=scene.width, height=scene.height)
    if outline.geometry is Geometry.BBOX:
        (left, top), (right, bottom) = corners
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    rows = [y for _, y in corners]
    return Mark(
        role=role,
        points=" ".join(f"{x:g},{y:g}" for x, y in corners),
        label=label,
        title=title,
        left_percent=round((min(x for x, _ in corners) + 0.5) / scene.width * 100, 2),
        top_percent=round((min(rows) + 0.5) / scene.height * 100, 2),
        bottom_percent=round((max(rows) + 0.5) / scene.height * 100, 2),
    )
