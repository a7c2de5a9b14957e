"""Axes of a chart: round ticks, and values to places. Every place is finite, whatever the journal held."""

import math
from dataclasses import dataclass

SMALLEST_SPAN = 1e-9
"""Relative to the magnitudes; narrower ranges are widened, since their ticks would read the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One labelled value of an axis."""

    value: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values, drawn from ``start`` to ``end`` (picture units; y axes run downwards, start > end)."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[Tick, ...]

    def place(self, value: float) -> float:
        """Where a value is drawn, rounded to a hundredth; values outside the range land on its ends.

        >>> Axis(low=0.0, high=4.0, start=100.0, end=0.0, ticks=()).place(1.0)
        75.0
        """
        share = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        return round(self.start + share * (self.end - self.start), 2)


def value_axis(low: float, high: float, *, start: float, end: float, as_percent: bool = False) -> Axis:
    """An axis over at least [low, high] whose ends are ticks.

    >>> [tick.label for tick in value_axis(0.0, 0.93, start=0.0, end=1.0).ticks]
    ['0', '0.2', '0.4', '0.6', '0.8', '1']
    >>> [tick.label for tick in value_axis(0.0, 7_000.0, start=0.0, end=1.0).ticks]
    ['0', '2k', '4k', '6k', '8k']
    >>> [tick.label for tick in value_axis(0.0, 0.03, start=0.0, end=1.0, as_percent=True).ticks]
    ['0%', '1%', '2%', '3%']
    >>> [tick.label for tick in value_axis(0.0, 1e-4, start=0.0, end=1.0).ticks]
    ['0', '2e-5', '4e-5', '6e-5', '8e-5', '1e-4']
    >>> [tick.label for tick in value_axis(0.0, 0.0, start=0.0, end=1.0).ticks][::5]
    ['0', '0.001']
    >>> value_axis(-3.0, 11.0, start=200.0, end=12.0).place(1e300)
    12.0
    """
    low, high = _widened(low, high)
    gap = _round_gap((high - low) / 5)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    ticks = tuple(
        Tick(value=place * gap, label=_label(place * gap, gap, as_percent=as_percent))
        for place in range(first, last + 1)
    )
    return Axis(low=ticks[0].value, high=ticks[-1].value, start=start, end=end, ticks=ticks)


def step_axis(first: int, last: int, *, start: float, end: float) -> Axis:
    """An axis from the first to the last step, ticks at round whole steps in between.

    >>> [tick.label for tick in step_axis(0, 60, start=0.0, end=1.0).ticks]
    ['0', '10', '20', '30', '40', '50', '60']
    >>> [tick.label for tick in step_axis(1, 1, start=0.0, end=1.0).ticks]
    ['1']
    """
    gap = max(1, round(_round_gap(max(last - first, 1) / 6)))
    ticks = tuple(
        Tick(value=float(step), label=f"{step:,}") for step in range(-(-first // gap) * gap, last + 1, gap)
    ) or (Tick(value=float(first), label=f"{first:,}"),)
    low, high = (float(first), float(last)) if last > first else (first - 1.0, first + 1.0)
    return Axis(low=low, high=high, start=start, end=end, ticks=ticks)


def _widened(low: float, high: float) -> tuple[float, float]:
    magnitude = max(abs(low), abs(high), 1e-3)
    if low == high == 0:
        return 0.0, magnitude
    return (low, high) if high - low > SMALLEST_SPAN * magnitude else (low - magnitude / 2, high + magnitude / 2)


def _round_gap(rough: float) -> float:
    """The next 1, 2 or 5 times a power of ten.

    >>> _round_gap(0.186), _round_gap(1400.0), _round_gap(3.0)
    (0.2, 2000.0, 5.0)
    """
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if rough <= factor * power * (1 + 1e-9))


def _label(value: float, gap: float, *, as_percent: bool) -> str:
    if as_percent:
        value, gap = 100 * value, 100 * gap
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if gap >= 0.1 * scale and abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    if gap < 1e-4:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}" if value else "0"
    decimals = max(0, -math.floor(math.log10(gap) + 1e-9))
    text = f"{value:.{decimals}f}"
    if float(text) == 0:
        text = "0"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text + ("%" if as_percent else "")
