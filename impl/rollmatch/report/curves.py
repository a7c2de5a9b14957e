"""Curves over the steps: journal events -> the places, labels and hover texts of one SVG each."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rollmatch.report.axes import Axis, step_axis, value_axis
from rollmatch.report.history import Event, History
from rollmatch.report.numbers import compact, finite, percent, plain

Column = Sequence[float | None]


def thin(columns: Sequence[Column], *, limit: int) -> tuple[int, ...]:
    """Indices of about ``limit`` rows to keep, ascending: per stretch each column's smallest and largest value.

    The first and the last row always stay. All columns have the same length; rows up to ``limit`` stay as they are.

    >>> thin([[0, 9, 1, 2, 3, -5, 4, 5]], limit=4)
    (0, 1, 5, 7)
    >>> thin([[3, None, 1]], limit=4)
    (0, 1, 2)
    """
    num_rows = len(columns[0]) if columns else 0
    if num_rows <= limit:
        return tuple(range(num_rows))
    num_stretches = max(1, limit // (2 * len(columns)))
    kept = {0, num_rows - 1}
    for stretch in range(num_stretches):
        rows = range(stretch * num_rows // num_stretches, (stretch + 1) * num_rows // num_stretches)
        for column in columns:
            kept.update(_extremes(column, rows))
    return tuple(sorted(kept))


def _extremes(column: Column, rows: range) -> set[int]:
    known = [(value, row) for row in rows if (value := column[row]) is not None]
    return {min(known)[1], max(known)[1]} if known else set()


def running_mean(column: Column, *, window: int) -> list[float | None]:
    """Mean of the known values in a window centred on each row; None where the row itself is unknown.

    >>> running_mean([1.0, 2.0, None, 6.0], window=3)
    [1.5, 1.5, None, 6.0]
    """
    means: list[float | None] = []
    for row, value in enumerate(column):
        around = column[max(0, row - window // 2) : row + window // 2 + 1]
        known = [number for number in around if number is not None]
        means.append(None if value is None else sum(known) / len(known))
    return means


WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 48.0, 448.0, 12.0, 200.0
MAX_POINTS = 240
SMOOTHED_FROM = 40
"""Points from which on a running mean stands in front of the raw curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing to draw in a plot. ``validation`` lines come from ``evaluated`` events, the others from ``step``."""

    label: str
    field: str
    validation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What a chart shows. ``ceiling`` is a value the axis reaches at least."""

    title: str
    lines: tuple[Line, ...]
    text: Callable[[object], str] = plain
    ceiling: float | None = None
    as_percent: bool = False
    hides_zeros: bool = False
    """Left out where all values are 0: the run does not measure it."""


REWARD = Plot(title="Reward", lines=(Line(label="training", field="reward"),
                                     Line(label="validation", field="reward", validation=True)))  # fmt: skip
PLOTS = (
    Plot(title="Loss", lines=(Line(label="total", field="loss"), Line(label="text (ce)", field="loss_ce"),
                              Line(label="coordinates", field="loss_coord"),
                              Line(label="true answers, validation", field="loss", validation=True))),
    Plot(title="Exact answers on held-out samples", lines=(Line(label="exact", field="exact", validation=True),),
         text=percent, as_percent=True, ceiling=1.0),
    Plot(title="F1", lines=(Line(label="training, at the matching gate", field="f1"),
                            Line(label="validation", field="f1", validation=True)), ceiling=1.0),
    REWARD,
    Plot(title="Distance to the policy before training (k3)", lines=(Line(label="kl", field="kl"),), hides_zeros=True),
    Plot(title="Entropy of the policy, nats per token", lines=(Line(label="entropy", field="entropy"),),
         hides_zeros=True),
    Plot(title="Length of responses, tokens", lines=(Line(label="training", field="response_len"),
                                                     Line(label="validation", field="response_len", validation=True)),
         text=compact),
    Plot(title="Clipped tokens, and groups that teach nothing", text=percent, as_percent=True, ceiling=0.05,
         lines=(Line(label="clipped", field="clip_share"), Line(label="flat groups", field="flat_group_rate"))),
    Plot(title="Engine and learner apart, mean |log-probability|", lines=(Line(label="drift", field="drift"),),
         text=compact),
    Plot(title="Divergence from the teacher", lines=(Line(label="of distributions", field="divergence"),
                                                     Line(label="at sampled tokens", field="teacher_kl"))),
    Plot(title="Mean log-probability of sampled tokens",
         lines=(Line(label="by the teacher", field="teacher_logprob"),
                Line(label="by the policy", field="policy_logprob"),
                Line(label="by the teacher, validation", field="teacher_logprob", validation=True))),
    Plot(title="Tokens that are the teacher's likeliest", text=percent, as_percent=True, ceiling=1.0,
         lines=(Line(label="share", field="teacher_agree"),)),
    Plot(title="Mean IoU of matches", lines=(Line(label="training", field="mean_iou"),
                                             Line(label="validation", field="mean_iou", validation=True)), ceiling=1.0),
    Plot(title="Invalid and truncated responses", text=percent, as_percent=True, ceiling=0.05,
         lines=(Line(label="invalid", field="invalid_rate"), Line(label="truncated", field="truncated_rate"))),
    Plot(title="Packing fill", lines=(Line(label="fill", field="fill"),), text=percent, as_percent=True, ceiling=1.0),
    Plot(title="Rollout speed, tokens per second", lines=(Line(label="tok/s", field="rollout_tok_s"),), text=compact,
         hides_zeros=True),
    Plot(title="Learning rate", lines=(Line(label="learning rate", field="learning_rate"),), text=compact),
    Plot(title="Gradient norm", lines=(Line(label="norm", field="grad_norm"),), text=compact),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stroke:
    """One drawn line. ``path`` and ``mean_path`` are SVG path data; ``dots`` are places of single points."""

    label: str
    latest: str
    path: str
    mean_path: str
    dots: tuple[tuple[float, float], ...]
    num_missing: int
    """Steps whose value was absent, NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One SVG. ``hover`` is what the page's script reads: places and texts per step."""

    title: str
    x: Axis
    y: Axis
    strokes: tuple[Stroke, ...]
    window: int
    hover: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What one line shows: values by step, None where there is no finite one."""

    line: Line
    steps: tuple[int, ...]
    values: tuple[float | None, ...]


def make_charts(history: History) -> tuple[Chart, ...]:
    """All plots that have at least one finite value; behind the reward, what it is made of."""
    place = PLOTS.index(REWARD) + 1
    plots = (*PLOTS[:place], *parts_of_rewards(field for event in history.steps for field in event), *PLOTS[place:])
    charts = (_make_chart(plot, history) for plot in plots)
    return tuple(chart for chart in charts if chart is not None)


def parts_of_rewards(fields: Iterable[str]) -> list[Plot]:
    """One plot of each reward function, where there are several, and of each figure that they have logged.

    >>> [plot.title for plot in parts_of_rewards(["reward/right", "reward/short", "metric/digits", "loss"])]
    ['Reward: right', 'Reward: short', 'Logged by rewards: digits']
    >>> parts_of_rewards(["reward", "reward/right"])
    []
    """
    known = dict.fromkeys(fields)
    rewards, figures = ([name for name in known if name.startswith(start)] for start in ("reward/", "metric/"))
    kinds = (("Reward", rewards if len(rewards) > 1 else []), ("Logged by rewards", figures))
    return [
        Plot(title=f"{kind}: {name.partition('/')[2]}", lines=tuple(replace(line, field=name) for line in REWARD.lines))
        for kind, names in kinds
        for name in names
    ]


def _make_chart(plot: Plot, history: History) -> Chart | None:
    series = shown(plot, [read_series(line, history) for line in plot.lines])
    return draw(plot, series) if series else None


def shown(plot: Plot, series: Sequence[Series]) -> list[Series]:
    """Lines that have something to show."""
    return [one for one in series if any(value is not None and (value or not plot.hides_zeros) for value in one.values)]


def draw(plot: Plot, series: Sequence[Series]) -> Chart:
    """A chart of lines that have at least one finite value each."""
    known = [value for one in series for value in one.values if value is not None]
    y = value_axis(
        min(0.0, *known), max(plot.ceiling or 0.0, *known), start=BOTTOM, end=TOP, as_percent=plot.as_percent
    )
    all_steps = [step for one in series for step in one.steps]
    x = step_axis(min(all_steps), max(all_steps), start=LEFT, end=RIGHT)
    window = max(5, max(len(one.steps) for one in series) // 40 * 2 + 1)
    return Chart(
        title=plot.title,
        x=x,
        y=y,
        strokes=tuple(_stroke(one, plot, x, y, window=window) for one in series),
        window=window,
        hover=_hover(series, plot, x, y),
    )


def read_series(line: Line, history: History) -> Series:
    """The values of a line in a run."""
    events: Sequence[Event] = history.evaluations if line.validation else history.steps
    figures = [event.get("metrics") if line.validation else event for event in events]
    return Series(
        line=line,
        steps=tuple(event["step"] for event in events),
        values=tuple(finite(figure.get(line.field)) if isinstance(figure, dict) else None for figure in figures),
    )


def _stroke(series: Series, plot: Plot, x: Axis, y: Axis, *, window: int) -> Stroke:
    known = [value for value in series.values if value is not None]
    smoothed = running_mean(series.values, window=window) if len(known) >= SMOOTHED_FROM else []
    runs = _unbroken_runs(series.steps, series.values)
    return Stroke(
        label=series.line.label,
        latest=plot.text(known[-1]),
        path=_path(runs, x, y),
        mean_path=_path(_unbroken_runs(series.steps, smoothed), x, y) if smoothed else "",
        dots=tuple(
            (x.place(step), y.place(value))
            for run in runs
            for step, value in (run if series.line.validation or len(run) == 1 else ())
        ),
        num_missing=len(series.values) - len(known),
    )


def _unbroken_runs(steps: Sequence[int], values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Points to be joined: thinned out, apart wherever a value is missing.

    >>> _unbroken_runs([1, 2, 3, 4], [0.1, 0.2, None, 0.4])
    [[(1, 0.1), (2, 0.2)], [(4, 0.4)]]
    """
    runs: list[list[tuple[int, float]]] = [[]]
    for step, value in zip(steps, values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    limit = max(4, MAX_POINTS // sum(map(bool, runs))) if any(runs) else MAX_POINTS
    return [[run[row] for row in thin([[value for _, value in run]], limit=limit)] for run in runs if run]


def _path(runs: Iterable[list[tuple[int, float]]], x: Axis, y: Axis) -> str:
    return "".join(
        "M" + "L".join(f"{x.place(step)} {y.place(value)}" for step, value in run) for run in runs if len(run) > 1
    )


def _hover(series: Sequence[Series], plot: Plot, x: Axis, y: Axis) -> dict[str, object]:
    """Per step the place of the ruler, and per line a dot's height and a text (null where there is none)."""
    tables = [dict(zip(one.steps, one.values)) for one in series]
    steps = sorted({step for table in tables for step in table})
    columns = [[table.get(step) for step in steps] for table in tables]
    kept = thin(columns, limit=MAX_POINTS)
    return {
        "steps": [steps[row] for row in kept],
        "x": [x.place(steps[row]) for row in kept],
        "lines": [
            {
                "label": one.line.label,
                "y": [None if column[row] is None else y.place(column[row] or 0.0) for row in kept],
                "text": [None if column[row] is None else plot.text(column[row]) for row in kept],
            }
            for one, column in zip(series, columns)
        ],
    }
