"""One evaluation file: what the model saw in every validation scene."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from rollmatch.errors import DataError, first_fault
from rollmatch.records import NUM_BINS, Geometry

Parts = tuple[float, float]
"""What one sample adds to the numerator and to the denominator of a figure."""
Bin = Annotated[int, Field(ge=0, lt=NUM_BINS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A true object as drawn."""

    desc: str
    geometry: Geometry
    bins: tuple[Bin, ...]
    """[4] x1 y1 x2 y2, or [2n] x y x y ..., n >= 3."""

    def __post_init__(self) -> None:
        size = len(self.bins)
        if size != 4 if self.geometry is Geometry.BBOX else size < 6 or size % 2:
            raise ValueError(f"{size} bins are no {self.geometry.value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Outline):
    """A predicted object and the true one it stands for."""

    partner: NonNegativeInt | None
    """Index into the scene's ``truth``, None for a false positive."""
    iou: float | None
    score: float | None = None
    """How sure the model was, 0..1; ``rollmatch eval`` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One validation sample with the model's answer."""

    sample_id: int | str
    image: str
    width: PositiveInt
    height: PositiveInt
    truth: tuple[Outline, ...]
    predicted: tuple[Prediction, ...]
    response_text: str
    invalid: bool

    def __post_init__(self) -> None:
        for prediction in self.predicted:
            if prediction.partner is not None and prediction.partner >= len(self.truth):
                raise ValueError(f"partner {prediction.partner} of {len(self.truth)} true objects")

    @property
    def partners(self) -> frozenset[int]:
        """Indices of the true objects that were found."""
        return frozenset(found.partner for found in self.predicted if found.partner is not None)

    @property
    def f1(self) -> float:
        """2 x found / (predicted + true); 1.0 where there is nothing to find and nothing was claimed."""
        total = len(self.predicted) + len(self.truth)
        return 2 * len(self.partners) / total if total else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of an evaluation by rewards or by true texts."""

    sample_id: int | str
    response_text: str
    question: str = ""
    """Empty where all samples have the configured prompt."""
    expected: str = ""
    reward: float | None = None
    exact: float | None = None
    """1 where the answer is the true one, character for character."""

    @property
    def worth(self) -> float | None:
        """Whatever it is judged by."""
        return self.exact if self.reward is None else self.reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All scenes of one evaluation. Returned by ``load_evaluation``, used by ``scenes``."""

    step: NonNegativeInt
    scenes: tuple[Scene, ...]
    answers: tuple[Answer, ...] = ()
    iou_threshold: float | None = None
    metrics: dict[str, object] = field(default_factory=dict)
    precision: str = ""
    """In which the answers were computed; empty: unknown."""
    sample_ids: tuple[int | str, ...] = ()
    """Of all samples, in the order of ``parts``."""
    parts: dict[str, tuple[Parts, ...]] = field(default_factory=dict)
    """Figure -> what each sample adds to it."""

    def __post_init__(self) -> None:
        if any(len(each) != len(self.sample_ids) for each in self.parts.values()):
            raise ValueError("parts and sample_ids differ in length")


def load_evaluation(path: Path) -> Evaluation:
    """Read ``evaluations/step-NNNNNN.json``. Errors: ``evaluation-file-broken``."""
    try:
        return _adapter().validate_json(path.read_bytes())
    except ValidationError as error:
        first = first_fault(error)
        raise DataError(
            first["msg"],
            code="evaluation-file-broken",
            key=":".join([str(path), ".".join(str(part) for part in first["loc"])]).rstrip(":"),
            remedy="Evaluate again, or remove the file: the page then goes without its pictures.",
        ) from error


@cache
def _adapter() -> TypeAdapter[Evaluation]:
    return TypeAdapter(Evaluation)
