"""One offline page about ``rollmatch eval``: figures, classes, and the images or answers that went worst."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollmatch.records import rounded
from rollmatch.report.answers import make_answer_rows
from rollmatch.report.evaluations import Evaluation
from rollmatch.report.numbers import MISSING, finite
from rollmatch.report.page import render, write_whole
from rollmatch.report.scenes import MAX_SCENES, Card, make_cards
from rollmatch.report.verdict import measures_of

PAGE_NAME = "eval.html"
LEADING = ("AP", "AP50", "AP75", "AR_100", "f1@0.5", "f1_desc@0.5", "invalid_rate", "truncated_rate")
"""Metrics of the first table, with bars; the others follow in a second one."""

Figures = Mapping[str, float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """One metric as the page shows it."""

    name: str
    text: str
    percent: float
    """Length of its bar."""


def write_detection_page(
    folder: Path, *, title: str, metrics: Figures, figures: Mapping[str, Any], evaluation: Evaluation
) -> Path:
    """Write ``eval.html``. ``figures``: by class, curve and drops, as in ``eval.json``. ``evaluation`` has all scenes;
    those with the lowest F1 are drawn."""
    by_desc: Mapping[str, Figures] = figures["by_desc"]
    curve: Sequence[float] = figures["precision_by_recall"]
    content = {
        "title": title,
        "leading": [figure_row(name, metrics[name]) for name in LEADING if name in metrics],
        "others": [figure_row(name, value) for name, value in metrics.items() if name not in LEADING],
        "columns": list(next(iter(by_desc.values()), {})),
        "classes": _classes(by_desc),
        "cards": worst_cards(evaluation, folder),
        "num_scenes": len(evaluation.scenes),
        "answers": (),
        "curve": " ".join(f"{place},{100 - 100 * value:.1f}" for place, value in enumerate(curve)),
        "drops": figures["drops"],
    }
    return write_whole(folder / PAGE_NAME, render("eval.html", content))


def write_answers_page(folder: Path, *, title: str, evaluation: Evaluation) -> Path:
    """Write ``eval.html``: figures, and the worst answers."""
    leading = {measure.key: measure.label for measure in measures_of(list(evaluation.metrics))}
    content = {
        "title": title,
        "leading": [figure_row(label, evaluation.metrics.get(key)) for key, label in leading.items()],
        "others": [figure_row(name, value) for name, value in evaluation.metrics.items() if name not in leading],
        "columns": [],
        "classes": [],
        "cards": (),
        "num_scenes": 0,
        "answers": make_answer_rows(evaluation, None),
        "curve": "",
        "drops": {},
    }
    return write_whole(folder / PAGE_NAME, render("eval.html", content))


def worst_cards(evaluation: Evaluation, folder: Path) -> tuple[Card, ...]:
    """The scenes with the lowest F1, worst first; ties in the order of the file."""
    worst = sorted(evaluation.scenes, key=lambda scene: scene.f1)[:MAX_SCENES]
    return make_cards(replace(evaluation, scenes=tuple(worst)), None, run_dir=folder)


def figure_row(name: str, value: object) -> FigureRow:
    """A metric with its text and bar."""
    number = finite(value)
    percent = 0.0 if number is None else 100 * min(max(number, 0.0), 1.0)
    return FigureRow(name=name, text=_text(value), percent=rounded(percent))


def _classes(by_desc: Mapping[str, Figures]) -> Sequence[tuple[str, list[str]]]:
    """(description, its figures), lowest AP first."""
    lowest = sorted(by_desc.items(), key=lambda item: (finite(item[1].get("AP")) or 0.0, item[0]))
    return [(desc, [_text(value) for value in figures.values()]) for desc, figures in lowest]


def _text(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    number = finite(value)
    return MISSING if number is None else f"{number:,.0f}" if number > 1 else f"{number:.3f}"
