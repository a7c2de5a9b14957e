"""One offline page about several runs: overlaid curves, figures side by side, configuration differences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from rollmatch.errors import LaunchError
from rollmatch.report.curves import Chart, Line, Plot, draw, read_series, shown
from rollmatch.report.history import History, load_history
from rollmatch.report.numbers import compact, duration, percent
from rollmatch.report.page import CONFIG_NAME, FRAME, render, write_whole

MOST_RUNS = 6
"""As many as the page has colours."""
PLOTS = (
    Plot(title="F1 on held-out samples", lines=(Line(label="", field="f1", validation=True),), ceiling=1.0),
    Plot(title="Reward on held-out samples", lines=(Line(label="", field="reward", validation=True),)),
    Plot(title="Mean IoU on held-out samples", lines=(Line(label="", field="mean_iou", validation=True),), ceiling=1.0),
    Plot(title="Loss of true answers, held-out", lines=(Line(label="", field="loss", validation=True),)),
    Plot(title="Loss", lines=(Line(label="", field="loss"),)),
    Plot(title="Invalid responses", lines=(Line(label="", field="invalid_rate"),), text=percent, as_percent=True),
    Plot(title="Rollout speed, tokens per second", lines=(Line(label="", field="rollout_tok_s"),), text=compact),
)
"""Each shows one field, a line per run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of a comparison."""

    name: str
    history: History
    settings: dict[str, object]
    """Dotted configuration key -> value."""


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page. Errors: ``runs-not-comparable``, those of ``load_history``."""
    if not 2 <= len(run_dirs) <= MOST_RUNS:
        problem = f"{len(run_dirs)} runs were given"
        raise LaunchError(problem, code="runs-not-comparable", key="RUN", remedy=f"Name two to {MOST_RUNS} runs.")
    names = _names(run_dirs)
    runs = [_read(path, name) for path, name in zip(run_dirs, names)]
    content = {"runs": runs, "charts": _charts(runs), "frame": FRAME, "figures": _figures(runs)}
    return write_whole(out, render("compare.html", content | {"differences": _differences(runs)}))


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """Directory names; whole paths where names repeat."""
    names = [path.resolve().name for path in run_dirs]
    return names if len(set(names)) == len(names) else [str(path) for path in run_dirs]


def _read(path: Path, name: str) -> ComparedRun:
    config = path / CONFIG_NAME
    tree = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return ComparedRun(name=name, history=load_history(path), settings=flat(tree))


def flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as dotted keys.

    >>> flat({"training": {"seed": 1}, "model": {}})
    {'training.seed': 1, 'model': {}}
    """
    found: dict[str, object] = {}
    for name, value in (tree or {}).items():
        nested = flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
        found |= nested
    return found


def _charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    charts = []
    for plot in PLOTS:
        series = [read_series(replace(line, label=run.name), run.history) for line in plot.lines for run in runs]
        known = shown(plot, series)
        if any(value for one in known for value in one.values):  # zeros in all runs say nothing
            charts.append(draw(plot, known))
    return charts


def _figures(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """(metric, the last held-out value of each run) of every metric that is not 0 in all runs."""
    last = [run.history.evaluations[-1]["metrics"] if run.history.evaluations else {} for run in runs]
    metrics = dict.fromkeys(name for figures in last for name, value in figures.items() if value)
    rows = [(name, [f"{figures[name]:z.4g}" if name in figures else "-" for figures in last]) for name in metrics]
    steps = ("optimizer steps", [str(len(run.history.steps)) for run in runs])
    return [steps, ("time", [duration(run.history.duration_s) for run in runs]), *rows]


def _differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """(key, each run's value) of the keys whose values differ."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [(key, [run.settings.get(key, "-") for run in runs]) for key in keys]
    return [(key, [str(value) for value in values]) for key, values in rows if any(v != values[0] for v in values)]
