"""The figures a model is judged by, and what became of them between two evaluations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmatch.report.numbers import finite, percent, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of an evaluation, 0..1."""

    key: str
    label: str
    higher_is_better: bool = True
    as_percent: bool = False

    def text(self, value: Any) -> str:
        """The figure as shown everywhere: three decimals, or a percentage."""
        return percent(value) if self.as_percent else plain(value)


MEASURES = (
    Measure(key="f1", label="F1"),
    Measure(key="f1_desc", label="F1, desc too"),
    Measure(key="precision", label="Precision"),
    Measure(key="recall", label="Recall"),
    Measure(key="mean_iou", label="Mean IoU"),
    Measure(key="invalid_rate", label="Invalid", higher_is_better=False, as_percent=True),
    Measure(key="truncated_rate", label="Truncated", higher_is_better=False, as_percent=True),
)

REWARD_MEASURES = (
    Measure(key="reward", label="Reward"),
    Measure(key="truncated_rate", label="Truncated", higher_is_better=False, as_percent=True),
    Measure(key="reward_failed_rate", label="Not judged", higher_is_better=False, as_percent=True),
)
"""Of a run that learns from rewards; each reward function's mean stands below the sum."""

SAME_WITHIN = 0.0005
"""Differences below this vanish in the three decimals shown, so they are no change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One measure before and after. ``delta`` is None where one side was not measured."""

    measure: Measure
    before: float | None
    after: float | None

    @property
    def delta(self) -> float | None:
        """After minus before."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, ``same`` or, where one side is missing, the empty string."""
        if self.delta is None:
            return ""
        if abs(self.delta) < SAME_WITHIN:
            return "same"
        return "better" if (self.delta > 0) == self.measure.higher_is_better else "worse"

    @property
    def direction(self) -> int:
        """1 up, -1 down, 0 neither."""
        if self.delta is None or abs(self.delta) < SAME_WITHIN:
            return 0
        return 1 if self.delta > 0 else -1

    @property
    def before_percent(self) -> float | None:
        """Where the earlier figure stands on a track from 0 to 1."""
        return _percent_of_track(self.before)

    @property
    def after_percent(self) -> float | None:
        """Where the later figure stands on a track from 0 to 1."""
        return _percent_of_track(self.after)

    @property
    def before_text(self) -> str:
        """The earlier figure as shown."""
        return self.measure.text(self.before)

    @property
    def after_text(self) -> str:
        """The later figure as shown."""
        return self.measure.text(self.after)

    @property
    def delta_text(self) -> str:
        """The difference with its sign; percentages differ in percentage points.

        >>> Change(measure=MEASURES[0], before=0.25, after=0.5).delta_text
        '+0.250'
        >>> Change(measure=MEASURES[5], before=0.5, after=0.25).delta_text
        '-25.0 pp'
        """
        if self.delta is None:
            return self.measure.text(None)
        shown = self.delta if self.direction else 0.0
        return f"{100 * shown:+.1f} pp" if self.measure.as_percent else f"{shown:+.3f}"


def _percent_of_track(value: float | None) -> float | None:
    return None if value is None else round(100 * min(1.0, max(0.0, value)), 2)


def compare(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> tuple[Change, ...]:
    """All measures of two evaluations' ``metrics``; None stands for an evaluation that has not happened."""
    old, new = before or {}, after or {}
    return tuple(
        Change(measure=measure, before=finite(old.get(measure.key)), after=finite(new.get(measure.key)))
        for measure in measures_of([*old, *new])
    )


def measures_of(keys: Sequence[str]) -> tuple[Measure, ...]:
    """The figures that such an evaluation is judged by.

    >>> [measure.label for measure in measures_of(["reward", "reward/form", "truncated_rate"])]
    ['Reward', 'Reward: form', 'Truncated', 'Not judged']
    """
    if "reward" not in keys:
        return MEASURES
    parts = sorted({key for key in keys if key.startswith("reward/")})
    named = (Measure(key=key, label=f"Reward: {key.partition('/')[2]}") for key in parts)
    return (REWARD_MEASURES[0], *named, *REWARD_MEASURES[1:])
