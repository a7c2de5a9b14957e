"""Where the time of a step went: stacked bars over the steps, totals and shares."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollmatch.records import rounded
from rollmatch.report.axes import Axis, step_axis, value_axis
from rollmatch.report.curves import BOTTOM, LEFT, RIGHT, TOP
from rollmatch.report.history import Event, History
from rollmatch.report.numbers import duration, finite, percent, plain

TIMED = ("sync", "rollout", "target", "pack", "learn")
"""Phases that a step times itself, in the order they happen."""
PHASES = (*TIMED, "other")
"""``other`` is what the step took beyond them."""
MAX_BARS = 90
BAR_SHARE = 0.8
"""Width of a bar as a share of its slot; the rest is the gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """One line of the table. ``path`` is the SVG path of this phase's share of all bars."""

    phase: str
    total: str
    per_step: str
    share: float
    share_text: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChart:
    """The stacked bars and their table; ``steps_per_bar`` steps are averaged in a bar."""

    x: Axis
    y: Axis
    rows: tuple[PhaseRow, ...]
    total: str
    per_step: str
    steps_per_bar: int
    hover: dict[str, object]


def make_phase_chart(history: History) -> PhaseChart | None:
    """None for a run whose steps hold no timing."""
    timed = [(event["step"], seconds) for event in history.steps if sum(seconds := _seconds(event)) > 0]
    if not timed:
        return None
    bars, steps_per_bar = _bars(timed)
    x = _bar_axis(timed[0][0], timed[-1][0], steps_per_bar)
    y = value_axis(0.0, max(sum(seconds) for _, seconds in bars), start=BOTTOM, end=TOP)
    width = min(40.0, BAR_SHARE * (x.place(x.low + steps_per_bar) - LEFT))
    totals = [sum(seconds[phase] for _, seconds in timed) for phase in range(len(PHASES))]
    return PhaseChart(
        x=x,
        y=y,
        rows=tuple(
            _row(phase, totals, len(timed), path=_stacked_path(bars, phase, x, y, width=width))
            for phase in range(len(PHASES))
            if totals[phase] > 0 or PHASES[phase] != "other"
        ),
        total=duration(sum(totals)),
        per_step=plain(sum(totals) / len(timed), digits=2),
        steps_per_bar=steps_per_bar,
        hover=_hover(bars, x, y, steps_per_bar),
    )


def _seconds(event: Event) -> tuple[float, ...]:
    """Seconds per phase in the order of ``PHASES``.

    >>> _seconds({"phase_s": {"sync": 0.5, "learn": 2.0}, "step_s": 3.0})
    (0.5, 0.0, 0.0, 0.0, 2.0, 0.5)
    """
    phase_s = event.get("phase_s")
    phase_s = phase_s if isinstance(phase_s, dict) else {}
    named = [max(0.0, finite(phase_s.get(phase)) or 0.0) for phase in TIMED]
    return (*named, max(0.0, (finite(event.get("step_s")) or 0.0) - sum(named)))


Timed = tuple[float, tuple[float, ...]]


def _bars(timed: Sequence[tuple[int, tuple[float, ...]]]) -> tuple[list[Timed], int]:
    """Middle and mean seconds of each stretch of steps that has timing, and the steps in a stretch.

    >>> _bars([(1, (2.0,)), (2, (4.0,)), (5, (1.0,))])
    ([(1.0, (2.0,)), (2.0, (4.0,)), (5.0, (1.0,))], 1)
    """
    first, last = timed[0][0], timed[-1][0]
    size = -(-(last - first + 1) // MAX_BARS)
    stretches: dict[int, list[tuple[float, ...]]] = {}
    for step, seconds in timed:
        stretches.setdefault((step - first) // size, []).append(seconds)
    means = [
        (
            first + stretch * size + (size - 1) / 2,
            tuple(sum(column) / len(rows) for column in zip(*rows)),
        )
        for stretch, rows in stretches.items()
    ]
    return means, size


def _bar_axis(first: int, last: int, steps_per_bar: int) -> Axis:
    """An axis that ends half a step outside the first and the last bar."""
    num_bars = -(-(last - first + 1) // steps_per_bar)
    ticks = step_axis(first, last, start=LEFT, end=RIGHT).ticks
    return Axis(low=first - 0.5, high=first - 0.5 + num_bars * steps_per_bar, start=LEFT, end=RIGHT, ticks=ticks)


def _row(phase: int, totals: Sequence[float], num_steps: int, *, path: str) -> PhaseRow:
    share = totals[phase] / sum(totals)
    return PhaseRow(
        phase=PHASES[phase],
        total=duration(totals[phase]),
        per_step=plain(totals[phase] / num_steps, digits=2),
        share=rounded(share),
        share_text=percent(share),
        path=path,
    )


def _stacked_path(bars: Sequence[Timed], phase: int, x: Axis, y: Axis, *, width: float) -> str:
    boxes = []
    for step, seconds in bars:
        left = round(x.place(step) - width / 2, 2)
        bottom, top = y.place(sum(seconds[:phase])), y.place(sum(seconds[: phase + 1]))
        if top < bottom:
            boxes.append(f"M{left} {bottom}V{top}h{width:.2f}V{bottom}z")
    return "".join(boxes)


def _hover(bars: Sequence[Timed], x: Axis, y: Axis, steps_per_bar: int) -> dict[str, object]:
    reach = (steps_per_bar - 1) / 2
    return {
        "steps": [f"{step - reach:.0f}-{step + reach:.0f}" if reach else int(step) for step, _ in bars],
        "x": [x.place(step) for step, _ in bars],
        "lines": [
            {"label": name, "y": [None] * len(bars), "text": [f"{plain(s[phase], digits=2)} s" for _, s in bars]}
            for phase, name in enumerate(PHASES)
        ],
    }
