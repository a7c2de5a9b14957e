"""Console output of a run: one line per optimizer step, a progress bar where there is a terminal."""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from types import TracebackType
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rollmatch.report.facts import run_facts
from rollmatch.report.history import Event
from rollmatch.report.numbers import MISSING, duration, finite, fixed, percent, plain
from rollmatch.report.phases import TIMED
from rollmatch.report.verdict import Change

SPEED_WINDOW_S = 3600.0
"""Past time that the ETA is worked out from; rich's own 30 s would see no two steps of a large model."""
RECENT_STEPS = 20
"""Steps whose median says how long the rest takes."""
STYLES = {"better": "green", "worse": "yellow", "same": "dim", "unclear": "dim", "": "dim"}


class StepConsole:
    """Lines about a run, under way. Use as a context manager, or call ``close``.

    On a terminal the lines scroll above a progress bar; anywhere else they are plain text, one line each, without
    escape codes. ``stream`` defaults to standard output.
    """

    def __init__(self, total_steps: int, stream: IO[str] | None = None) -> None:
        self._console = make_console(stream)
        self._total_steps = total_steps
        self._progress = _make_progress(self._console) if self._console.is_terminal else None
        self._task = None if self._progress is None else self._progress.add_task("training", total=total_steps)
        self._seen_steps = False
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        if self._progress is not None:
            self._progress.start()

    def step(self, event: Mapping[str, object]) -> None:
        """Print one optimizer step: the journal's ``step`` event. What is missing shows as a dash."""
        line = step_line(event, total_steps=self._total_steps)
        if self._progress is not None and line.cell_len > self._console.width:
            line = step_line(event, total_steps=self._total_steps, with_phases=False)
        if self._progress is None:  # the bar says it
            line.append_text(self._time_left(event))
        self._print(line)
        self._advance(event.get("step"))

    def _time_left(self, event: Mapping[str, object]) -> Text:
        """From the median of the last steps: the first one compiles."""
        step, seconds = event.get("step"), finite(event.get("step_s"))
        if seconds is None or type(step) is not int:
            return Text()
        self._seconds.append(seconds)
        left = median(self._seconds) * (self._total_steps - step)
        return Text(f"  left {duration(left)}", "dim") if left > 0 else Text()

    def note(self, text: str) -> None:
        """Print a note."""
        self._print(Text(text))

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._print(Text.assemble(("warning: ", "yellow bold"), (text, "yellow")))

    def close(self) -> None:
        """Take the progress bar away; further lines still work."""
        if self._progress is not None:
            self._progress.stop()

    def __enter__(self) -> "StepConsole":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _print(self, line: Text) -> None:
        print_line(line, self._console)

    def _advance(self, step: object) -> None:
        if self._progress is None or self._task is None or type(step) is not int:
            return
        if not self._seen_steps:
            # A resumed run begins in the middle: the steps of its earlier life must not make it look fast.
            self._progress.reset(self._task, completed=step - 1, total=self._total_steps)
            self._seen_steps = True
        self._progress.update(self._task, completed=step)


def make_console(stream: IO[str] | None = None) -> Console:
    """A console. Whether it is a terminal depends on the stream, not on the environment."""
    stream = sys.stdout if stream is None else stream
    is_terminal = stream.isatty()
    return Console(file=stream, force_terminal=is_terminal, no_color=None if is_terminal else True)


def print_line(line: Text, console: Console) -> None:
    """One line, however long; characters that the stream cannot hold are spelled as escapes."""
    writable = line.plain.encode(console.encoding, errors="backslashreplace").decode(console.encoding)
    console.print(line if writable == line.plain else Text(writable), soft_wrap=True)


def step_line(event: Mapping[str, object], *, total_steps: int, with_phases: bool = True) -> Text:
    """A step as one line whose columns stay in place from step to step.

    >>> event = {"step": 7, "loss": 1.8434, "f1": 0.61, "mean_iou": 0.48, "invalid_rate": 0.0, "fill": 0.93}
    >>> event |= {"malformed_rate": 0.02, "truncated_rate": 0.1, "rollout_tok_s": 2310.4}
    >>> step_line(event, total_steps=60, with_phases=False).plain.split("invalid")[0]
    'step  7/60  loss 1.843  f1 0.61  iou 0.48  '
    >>> step_line(event, total_steps=60, with_phases=False).plain.split("invalid")[1]
    '   0.0%  malformed   2.0%  cut  10.0%  fill 0.93  rollout  2,310 tok/s'
    >>> step_line(event | {"carried": 5.0}, total_steps=60, with_phases=False).plain.partition("fill")[2]
    ' 0.93  waiting 5  rollout  2,310 tok/s'
    """
    width = len(str(total_steps))
    line = Text.assemble(
        ("step ", "dim"),
        (f"{event.get('step', MISSING):>{width}}/{total_steps}", "bold"),
        ("  loss ", "dim"),
        fixed(event.get("loss")),
        _quality(event),
        ("  fill ", "dim"),
        f"{plain(event.get('fill'), digits=2):>4}",
    )
    if event.get("carried"):
        line.append_text(Text.assemble(("  waiting ", "dim"), plain(event["carried"], digits=0)))
    if event.get("rollout_tokens") != 0:  # stage 1 generates nothing
        speed = f"{plain(event.get('rollout_tok_s'), digits=0):>6}"
        line.append_text(Text.assemble(("  rollout ", "dim"), speed, (" tok/s", "dim")))
    return line.append_text(_phases(event)) if with_phases else line


def _quality(event: Mapping[str, object]) -> Text:
    if "teacher_kl" in event:
        return _taught(event)
    if "reward" in event:
        return _rewards(event)
    is_stage_1 = "loss_ce" in event and "f1" not in event
    return _losses(event) if is_stage_1 else _matches(event)


def _losses(event: Mapping[str, object]) -> Text:
    if "loss_coord" not in event:  # the loss is that of the text
        return Text()
    return Text.assemble(
        ("  text ", "dim"), fixed(event.get("loss_ce")), ("  coordinates ", "dim"), fixed(event.get("loss_coord"))
    )


def _matches(event: Mapping[str, object]) -> Text:
    invalid = finite(event.get("invalid_rate"))
    return Text.assemble(
        ("  f1 ", "dim"),
        (f"{plain(event.get('f1'), digits=2):>4}", "bold"),
        ("  iou ", "dim"),
        f"{plain(event.get('mean_iou'), digits=2):>4}",
        ("  invalid ", "dim"),
        (f"{percent(invalid):>6}", "yellow" if invalid else ""),
        *_share("malformed", event.get("malformed_rate")),
        *_share("cut", event.get("truncated_rate")),
    )


def _share(name: str, value: object) -> tuple[tuple[str, str], ...]:
    """A share that should be 0; left out where it was not measured."""
    share = finite(value)
    shown = ((f"  {name} ", "dim"), (f"{percent(share):>6}", "yellow" if share else ""))
    return () if share is None else shown


def _rewards(event: Mapping[str, object]) -> Text:
    """Of a run that learns from rewards; ``drift`` is how far engine and learner are apart."""
    return Text.assemble(
        ("  reward ", "dim"),
        (f"{plain(event.get('reward')):>6}", "bold"),
        *_share("flat", event.get("flat_group_rate")),
        *_share("cut", event.get("truncated_rate")),
        *(_share("failed", failed) if (failed := finite(event.get("reward_failed_rate"))) else ()),
        ("  kl ", "dim"),
        f"{plain(event.get('kl'), digits=4):>6}",
        ("  clip ", "dim"),
        f"{percent(finite(event.get('clip_share'))):>6}",
        ("  drift ", "dim"),
        f"{plain(event.get('drift'), digits=4):>6}",
    )


def _taught(event: Mapping[str, object]) -> Text:
    """Of a run that learns from teachers; a reward is shown where there is one.

    >>> event = {"teacher_kl": 0.41, "divergence": 0.052, "teacher_agree": 0.75, "truncated_rate": 0.0}
    >>> _taught(event | {"reward/right": 0.25}).plain
    '  right  0.250  divergence 0.052  kl 0.4100  agree  75.0%  cut   0.0%'
    """
    parts = [(name, event[name]) for name in event if name.startswith("reward/")]
    rewards = [("reward", event["reward"])] if "reward" in event else parts
    shown = [
        part
        for name, value in rewards
        for part in ((f"  {name.removeprefix('reward/')} ", "dim"), (f"{plain(value):>6}", "bold"))
    ]
    return Text.assemble(
        *shown,
        ("  divergence ", "dim"),
        fixed(event.get("divergence")),
        ("  kl ", "dim"),
        f"{plain(event.get('teacher_kl'), digits=4):>6}",
        ("  agree ", "dim"),
        f"{percent(finite(event.get('teacher_agree'))):>6}",
        *_share("cut", event.get("truncated_rate")),
    )


def _phases(event: Mapping[str, object]) -> Text:
    phase_s = event.get("phase_s")
    seconds = phase_s if isinstance(phase_s, Mapping) else {}
    generates = event.get("rollout_tokens") != 0
    line = Text(" ")
    for phase in TIMED if generates else ("pack", "learn"):
        line.append(f" {phase} ", "dim").append(_seconds(seconds.get(phase)))
    line.append(" s", "dim")
    return line.append_text(_overlap(event)) if generates and event.get("overlap") else line


def _overlap(event: Event) -> Text:
    """The longer of rollout and learning over the step, and how old the rollouts were if they were old."""
    line = Text("  efficiency ", "dim").append(plain(event["overlap"].get("efficiency"), digits=2), "bold")
    ages = {age: number for age, number in event.get("staleness", {}).items() if age != "0"}
    if ages:
        line.append("  stale ", "dim").append(" ".join(f"{number} by {age}" for age, number in ages.items()))
    return line


def _seconds(value: object) -> str:
    """Tenths of a second below 100 s, whole seconds above, four characters."""
    number = finite(value)
    return f"{plain(number, digits=1 if number is not None and number < 99.95 else 0):>4}"


def _make_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("elapsed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        expand=True,
        speed_estimate_period=SPEED_WINDOW_S,
    )


def print_header(event: Mapping[str, object], *, stream: IO[str] | None = None) -> None:
    """Say what is about to run: the journal's ``run`` event, a fact a line."""
    console = make_console(stream)
    facts = run_facts(event)
    width = max(len(label) for label, _ in facts)
    print_line(Text("rollmatch", style="bold"), console)
    for label, text in facts:
        print_line(Text.assemble((f"  {label:<{width}}  ", "dim"), text), console)


def print_before_after(changes: Sequence[Change], caption: str = "", *, stream: IO[str] | None = None) -> None:
    """Print the final table; ``caption`` says on what and how it was measured."""
    console = make_console(stream)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("validation")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    is_unicode = console.encoding.startswith("utf")
    arrows, sign = (ARROWS, "\u00b1") if is_unicode else (ASCII_ARROWS, "+-")
    for change in changes:
        table.add_row(*_cells(change, arrows[change.direction], sign))
    console.print(table)
    if caption:
        print_line(Text(f"{caption}; {sign} is the 95 % interval over samples", style="dim"), console)


ARROWS = {1: "\u25b2", -1: "\u25bc", 0: " "}
ASCII_ARROWS = {1: "^", -1: "v", 0: " "}


def _cells(change: Change, arrow: str, sign: str) -> tuple[Text, ...]:
    style = STYLES[change.verdict]
    return (
        Text(change.measure.label),
        Text(change.before_text),
        Text(change.after_text, style="bold"),
        Text(change.delta_text.replace("\u00b1", sign), style=style),
        Text(f"{arrow} {change.verdict}".rstrip(), style=style),
    )
