"""One offline page about a run: everything in a single file, nothing fetched."""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from rollmatch.errors import LaunchError
from rollmatch.report.answers import make_answer_rows
from rollmatch.report.curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, make_charts
from rollmatch.report.episodes import make_episode_sheet
from rollmatch.report.evaluations import Evaluation, load_evaluation
from rollmatch.report.facts import make_completion_groups, make_drop_rows, make_facts
from rollmatch.report.gantt import make_gantt
from rollmatch.report.history import History, load_history
from rollmatch.report.noise import noise_between
from rollmatch.report.phases import make_phase_chart
from rollmatch.report.scenes import make_cards
from rollmatch.report.verdict import make_verdict

PAGE_NAME = "run.html"
CONFIG_NAME = "resolved.yaml"
FRAME = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}


def write_page(run_dir: str | Path) -> Path:
    """Write ``run.html`` into a run directory and return its path; the old page stays until the new one is whole.

    Errors: ``journal-missing``, ``JournalLineBroken``, ``evaluation-file-broken``.
    """
    run_dir = Path(run_dir)
    return write_whole(run_dir / PAGE_NAME, render("page.html", _content(run_dir)))


def render(sheet: str, content: dict[str, object]) -> str:
    """One of the templates, filled."""
    return _environment().get_template(sheet).render(content)


def write_whole(path: Path, text: str) -> Path:
    """Write a page; what stood there stays until the new one is whole. Errors: ``output-not-writable``."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    # Lone surrogates may stand in a journal's escapes, but in no UTF-8 file.
    try:
        unfinished.touch(mode=0o600)  # samples, and arguments of other libraries, are for the run's owner
        unfinished.write_text(text, encoding="utf-8", errors="replace", newline="\n")
        unfinished.replace(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        remedy = "Name a file in a directory that exists, and that you may write to."
        raise LaunchError(str(error.strerror), code="output-not-writable", key=str(path), remedy=remedy) from error
    finally:
        with suppress(OSError):
            unfinished.unlink()  # on a full disk
    return path


def _content(run_dir: Path) -> dict[str, object]:
    history = load_history(run_dir)
    loaded, missing = load_first_and_last(history, run_dir)
    cards = make_cards(loaded[0], loaded[1] if len(loaded) > 1 else None, run_dir=run_dir) if loaded else ()
    config = run_dir / CONFIG_NAME
    return {
        "name": run_dir.resolve().name,
        "verdict": make_verdict(history, noise_between(*loaded) if len(loaded) > 1 else {}),
        "facts": make_facts(history),
        "charts": make_charts(history),
        "phases": make_phase_chart(history),
        "gantt": make_gantt(history),
        "episodes": make_episode_sheet(history),
        "drops": make_drop_rows(history),
        "completions": make_completion_groups(history),
        "cards": cards,
        "num_scenes": len(loaded[0].scenes) if loaded else 0,
        "answers": make_answer_rows(loaded[0], loaded[1] if len(loaded) > 1 else None) if loaded else (),
        "missing": missing,
        "config": config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        "frame": FRAME,
    }


def load_first_and_last(history: History, run_dir: Path) -> tuple[list[Evaluation], tuple[str, ...]]:
    """The evaluations that a run is judged by, and the files that are named but not there."""
    named = [str(event.get("file", "")) for event in history.evaluations]
    wanted = [named[0], named[-1]] if len(named) > 1 else named
    paths = [_evaluation_path(name, run_dir) for name in wanted]
    missing = tuple(name for name, path in zip(wanted, paths) if name and path is None)
    return [load_evaluation(path) for path in paths if path is not None], missing


def _evaluation_path(name: str, run_dir: Path) -> Path | None:
    """As named inside the run directory; under its bare name in ``evaluations/`` if the directory was moved."""
    candidates = (run_dir / name, run_dir / "evaluations" / Path(name).name)
    return next((path for path in candidates if name and path.is_file()), None)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("rollmatch.report", "sheets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
