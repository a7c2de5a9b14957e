"""Who was busy when: the servers and the learner ranks over the last steps of a run, on one clock."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollmatch.report.axes import Axis, value_axis
from rollmatch.report.history import Event, History
from rollmatch.report.numbers import finite, percent, plain

LEFT, RIGHT, TOP = 84.0, 932.0, 8.0
LANE = 24.0
"""Height of a lane; that of the bars in it, and the width of the whole, are the template's."""
MAX_STEPS = 6
NARROWEST = 0.6
"""A bar is drawn at least so wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One rectangle and its hover text."""

    x: float
    width: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A server or a learner rank."""

    label: str
    y: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gantt:
    """The lanes, the borders of the steps as (place, text), and the mean figures of all steps."""

    x: Axis
    lanes: tuple[Lane, ...]
    borders: tuple[tuple[float, str], ...]
    height: float
    bottom: float
    figures: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...]


def make_gantt(history: History) -> Gantt | None:
    """None for a run without timeline events."""
    known = [event for event in history.others.get("timeline", ()) if _is_whole(event)]
    if not known:
        return None
    last = sorted({event["step"] for event in known})[-MAX_STEPS:]
    shown = [event for event in known if event["step"] in last]
    begin, end = min(event["began"] for event in shown), max(event["ended"] for event in shown)
    x = value_axis(0.0, max(end - begin, 1e-3), start=LEFT, end=RIGHT)
    lanes = _lanes(shown, x, begin=begin)
    bottom = TOP + LANE * len(lanes)
    return Gantt(
        x=x,
        lanes=lanes,
        borders=tuple((x.place(e["began"] - begin), str(e["step"] + 1)) for e in shown if e.get("rank", 0) == 0),
        height=bottom + 42,
        bottom=bottom,
        figures=_figures(history.steps),
        kinds=tuple(dict.fromkeys(bar.kind for lane in lanes for bar in lane.bars)),
    )


def _is_whole(event: Event) -> bool:
    times = [event.get("began"), event.get("ended")]
    spans = [*event.get("learner", ()), *event.get("calls", ())]
    return None not in [finite(value) for value in times] and all(isinstance(span, list) for span in spans)


def _lanes(events: Sequence[Event], x: Axis, *, begin: float) -> tuple[Lane, ...]:
    calls: dict[int, list[Bar]] = {}
    learners: dict[int, list[Bar]] = {}
    for event in events:
        for server, start, end, step, *_ in event.get("calls", ()):
            text = f"rollouts of step {int(step) + 1}, {plain(end - start, digits=2)} s"
            kind = f"call-{int(step) % 2}"
            calls.setdefault(int(server), []).append(place_bar(x, start - begin, end - begin, kind=kind, text=text))
        for phase, start, end in event.get("learner", ()):
            name = "waits" if phase == "rollout" else str(phase)
            text = f"step {event['step'] + 1}: {name}, {plain(end - start, digits=2)} s"
            bars = learners.setdefault(int(event.get("rank", 0)), [])
            bars.append(place_bar(x, start - begin, end - begin, kind=name, text=text))
    named = [("rollouts" if len(calls) == 1 else f"server {server}", calls[server]) for server in sorted(calls)]
    named += [("learner" if len(learners) == 1 else f"learner {rank}", learners[rank]) for rank in sorted(learners)]
    return tuple(
        Lane(label=label, y=TOP + LANE * place, bars=tuple(bar for bar in bars if bar.width > 0))
        for place, (label, bars) in enumerate(named)
    )


def place_bar(x: Axis, start: float, end: float, *, kind: str, text: str) -> Bar:
    """A bar from ``start`` to ``end`` seconds; without width where it ends before the axis begins."""
    left, right = x.place(start), x.place(end)
    return Bar(
        x=left, width=max(NARROWEST, round(right - left, 2)) if end > max(0.0, start) else 0.0, kind=kind, text=text
    )


def _figures(steps: Iterable[Event]) -> tuple[tuple[str, str], ...]:
    """Means over all steps that have them."""
    known = [event["overlap"] for event in steps if isinstance(event.get("overlap"), dict)]

    def mean(name: str) -> float | None:
        values = [value for figures in known if (value := finite(figures.get(name))) is not None]
        return sum(values) / len(values) if values else None

    ages: dict[str, int] = {}
    for event in steps:
        staleness = event.get("staleness")
        for age, number in staleness.items() if isinstance(staleness, dict) else ():
            if str(age).isdecimal():
                ages[str(age)] = ages.get(str(age), 0) + int(finite(number) or 0)
    rows = [
        ("rollout R, s", plain(mean("rollout_s"), digits=2)),
        ("learning L, s", plain(mean("learn_s"), digits=2)),
        ("sync, s", plain(mean("sync_s"), digits=2)),
        ("servers idle", percent(mean("servers_idle"))),
        ("learner idle", percent(mean("learner_idle"))),
        ("efficiency, max(R, L) / step", plain(mean("efficiency"), digits=3)),
    ]
    rows += [(f"rollouts {age} step{'s' if age != '1' else ''} old", f"{ages[age]:,}") for age in sorted(ages, key=int)]
    return tuple(rows) if known else ()
