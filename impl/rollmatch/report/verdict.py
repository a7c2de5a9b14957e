"""Measures of an evaluation, their change over a run, and the summary at the top of the page."""

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rollmatch.report.history import Event, History
from rollmatch.report.numbers import finite, percent, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of an evaluation."""

    key: str
    label: str
    higher_is_better: bool = True
    as_percent: bool = False
    has_track: bool = True
    """Whether its values are shares, which have a place between 0 and 1."""

    def text(self, value: object) -> str:
        """The figure as shown everywhere: three decimals, or a percentage."""
        return percent(value) if self.as_percent else plain(value)


MEASURES = (
    Measure(key="f1", label="F1"),
    Measure(key="f1_desc", label="F1, desc too"),
    Measure(key="precision", label="Precision"),
    Measure(key="recall", label="Recall"),
    Measure(key="mean_iou", label="Mean IoU"),
    Measure(key="invalid_rate", label="Invalid", higher_is_better=False, as_percent=True),
    Measure(key="malformed_rate", label="Malformed objects", higher_is_better=False, as_percent=True),
    Measure(key="truncated_rate", label="Truncated", higher_is_better=False, as_percent=True),
)

LOSS = Measure(key="loss", label="Loss", higher_is_better=False, has_track=False)
"""Of the true answers, where they are taught."""
TEXT_MEASURES = (
    LOSS,
    Measure(key="exact", label="Exact answers", as_percent=True),
    Measure(key="truncated_rate", label="Truncated", higher_is_better=False, as_percent=True),
)
"""Of a run that learns answers of any text."""

REWARD_MEASURES = (
    Measure(key="reward", label="Reward"),
    Measure(key="truncated_rate", label="Truncated", higher_is_better=False, as_percent=True),
    Measure(key="reward_failed_rate", label="Not judged", higher_is_better=False, as_percent=True),
)
"""Of a run that learns from rewards; each reward function's mean stands below the sum."""

TEACHER_MEASURE = Measure(key="teacher_logprob", label="Log-probability by the teacher")
"""Of a run that learns from teachers, per token; it stands below the rewards."""

SAME_WITHIN = 0.0005
"""Differences below this vanish in the three decimals shown, so they are no change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One measure before and after. ``delta`` is None where one side was not measured."""

    measure: Measure
    before: float | None
    after: float | None
    noise: float | None = None
    """Half of the 95 % interval of the change over the samples; None: unknown."""

    @property
    def is_noise(self) -> bool:
        """Whether other samples might as well have shown no change."""
        return self.delta is not None and self.noise is not None and abs(self.delta) <= self.noise

    @property
    def delta(self) -> float | None:
        """After minus before."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, ``same``, ``unclear`` or, where one side is missing, the empty string."""
        if self.delta is None:
            return ""
        if abs(self.delta) < SAME_WITHIN:
            return "same"
        if self.is_noise:
            return "unclear"
        return "better" if (self.delta > 0) == self.measure.higher_is_better else "worse"

    @property
    def direction(self) -> int:
        """1 up, -1 down, 0 neither, or as likely by the choice of samples."""
        if self.delta is None or abs(self.delta) < SAME_WITHIN or self.is_noise:
            return 0
        return 1 if self.delta > 0 else -1

    @property
    def before_percent(self) -> float | None:
        """Where the earlier figure stands on a track from 0 to 1."""
        return _percent_of_track(self.before) if self.measure.has_track else None

    @property
    def after_percent(self) -> float | None:
        """Where the later figure stands on a track from 0 to 1."""
        return _percent_of_track(self.after) if self.measure.has_track else None

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
        >>> Change(measure=MEASURES[5], before=0.5, after=0.25, noise=0.31).delta_text
        '-25.0 \u00b1 31.0 pp'
        """
        if self.delta is None:
            return self.measure.text(None)
        shown, noise = 0.0 if self.verdict == "same" else self.delta, self.noise
        scale, digits = (100, 1) if self.measure.as_percent else (1, 3)
        within = "" if noise is None or not math.isfinite(noise) else f" \u00b1 {scale * noise:.{digits}f}"
        return f"{scale * shown:+z.{digits}f}{within}{' pp' if self.measure.as_percent else ''}"


def _percent_of_track(value: float | None) -> float | None:
    return None if value is None else round(100 * min(1.0, max(0.0, value)), 2)


def compare(
    before: Mapping[str, object] | None,
    after: Mapping[str, object] | None,
    noise: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Change, ...]:
    """All measures of two evaluations' ``metrics``; None stands for an evaluation that has not happened.

    ``noise``: as ``noise_between``.
    """
    old, new = before or {}, after or {}
    return tuple(
        Change(
            measure=measure,
            before=finite(old.get(measure.key)),
            after=finite(new.get(measure.key)),
            noise=noise.get(measure.key),
        )
        for measure in measures_of([*old, *new])
    )


def measures_of(keys: Sequence[str]) -> tuple[Measure, ...]:
    """The figures that such an evaluation is judged by.

    >>> [measure.label for measure in measures_of(["reward", "reward/form", "truncated_rate"])]
    ['Reward', 'Reward: form', 'Truncated', 'Not judged']
    >>> [measure.label for measure in measures_of(["teacher_logprob", "reward/right", "truncated_rate"])]
    ['Reward: right', 'Log-probability by the teacher', 'Truncated']
    """
    if "exact" in keys:
        return TEXT_MEASURES
    if "reward" not in keys and TEACHER_MEASURE.key not in keys:
        return (*MEASURES, LOSS) if "loss" in keys else MEASURES
    total, *rates = [measure for measure in REWARD_MEASURES if measure.key in keys or "reward" in keys]
    parts = sorted({key for key in keys if key.startswith("reward/")})
    named = (Measure(key=key, label=f"Reward: {key.partition('/')[2]}") for key in parts)
    of_teachers = (TEACHER_MEASURE,) if TEACHER_MEASURE.key in keys else ()
    if "reward" not in keys:
        return (*named, *of_teachers, total, *rates)
    return (total, *named, *of_teachers, *rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The head of the page. ``after_step`` is None until a second evaluation is there."""

    status: str
    """``finished``, ``interrupted`` or ``unfinished``; the style sheet knows these words."""
    status_text: str
    headline: str
    notices: tuple[str, ...]
    before_step: int | None
    after_step: int | None
    changes: tuple[Change, ...]
    caption: str
    """On how many samples, and in which precision."""


def caption_of(first: Event | None, last: Event | None) -> str:
    """Of two ``evaluated`` events; older ones say less.

    >>> caption_of({"metrics": {"num_scenes": 12.0}, "precision": "float32"}, None)
    '12 samples, computed in float32'
    """
    num = finite(_metrics(first).get("num_scenes"))
    found = [str(each["precision"]) for each in (first, last) if each and each.get("precision")]
    names = list(dict.fromkeys(found))
    precisions = "" if not names else f"computed in {names[0]}"
    if len(names) > 1:
        precisions = f"computed in {names[0]} before and {names[1]} after, which is no comparison"
    return ", ".join(([] if num is None else [f"{num:,.0f} samples"]) + ([precisions] if precisions else []))


def make_verdict(history: History, noise: Mapping[str, float] = MappingProxyType({})) -> Verdict:
    """Judge by the first and the last evaluation; ``noise``: as ``noise_between`` of them."""
    first = history.evaluations[0] if history.evaluations else None
    last = history.evaluations[-1] if len(history.evaluations) > 1 else None
    changes = compare(_metrics(first), _metrics(last), noise) if first else ()
    status, status_text = _status(history)
    return Verdict(
        status=status,
        status_text=status_text,
        headline=_headline(history, changes),
        notices=(*_notices(history), *_shortcuts(changes)),
        before_step=first["step"] if first else None,
        after_step=last["step"] if last else None,
        changes=changes,
        caption=caption_of(first, last),
    )


def _metrics(event: Event | None) -> Event:
    metrics = event.get("metrics") if event else None
    return metrics if isinstance(metrics, dict) else {}


def _signal_name(number: object) -> str:
    """A signal by its name, which the journal holds as a number.

    >>> _signal_name(15), _signal_name("SIGINT"), _signal_name(None)
    ('SIGTERM', 'SIGINT', 'a signal')
    """
    if isinstance(number, int):
        return next((each.name for each in signal.Signals if each == number), f"signal {number}")
    return number if isinstance(number, str) else "a signal"


def _status(history: History) -> tuple[str, str]:
    planned = history.run.get("max_steps")
    done = f"{history.last_step:,} of {planned:,} steps" if type(planned) is int else f"{history.last_step:,} steps"
    if history.ending is None:
        return "unfinished", f"unfinished: {done} so far"
    if history.ending["event"] == "interrupted":
        return "interrupted", f"interrupted by {_signal_name(history.ending.get('signal'))}: {done}"
    return "finished", f"finished: {done}"


def _headline(history: History, changes: Sequence[Change]) -> str:
    if not changes:
        if history.run.get("num_val_samples") == 0:
            return f"{_steps(len(history.steps))}; there are no held-out samples to evaluate."
        return "Not evaluated yet." if history.steps else "No step and no evaluation yet."
    if len(history.evaluations) == 1:
        step = history.evaluations[0]["step"]
        return f"{_now(changes[0])} at step {step:,}; the evaluation to compare with is still to come."
    span = history.evaluations[-1]["step"] - history.evaluations[0]["step"]
    sentence = f"{_moved(changes[0])} in {_steps(span)}."
    by_key = {change.measure.key: change for change in changes}
    invalid, malformed = by_key.get("invalid_rate"), by_key.get("malformed_rate")
    if invalid is None or not invalid.direction:
        return sentence
    still = f", {malformed.after_text} of the objects are malformed" if malformed and malformed.after else ""
    return f"{sentence} {_moved(invalid)}{still}."


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


SUBJECTS = {
    "f1": "F1",
    "loss": "Loss of the true answers",
    "reward": "Mean reward",
    "invalid_rate": "Invalid responses",
}


def _moved(change: Change) -> str:
    subject = SUBJECTS.get(change.measure.key, change.measure.label)
    if change.delta is None:
        return f"{subject} went from {change.before_text} to {change.after_text}"
    if change.verdict == "unclear":
        return f"{subject} went from {change.before_text} to {change.after_text}, which may be noise,"
    if change.direction == 0:
        return f"{subject} stayed at {change.after_text}"
    verb = "rose" if change.direction > 0 else "fell"
    return f"{subject} {verb} from {change.before_text} to {change.after_text}"


def _now(change: Change) -> str:
    return f"{SUBJECTS.get(change.measure.key, change.measure.label)} was {change.before_text}"


def _shortcuts(changes: Sequence[Change]) -> tuple[str, ...]:
    """A policy that comes to please its teacher and not its rewards; teachers may see what the question does not say.

    >>> rose = Change(measure=TEACHER_MEASURE, before=-0.9, after=-0.4)
    >>> fell = Change(measure=Measure(key="reward/right", label="Reward: right"), before=0.3, after=0.2)
    >>> len(_shortcuts([rose, fell])), _shortcuts([fell]), _shortcuts([rose])
    (1, (), ())
    """
    rewards = [change for change in changes if change.measure.key.startswith("reward") and change.delta is not None]
    rewards = [change for change in rewards if change.measure.key != "reward_failed_rate"]
    teachers = [change for change in changes if change.measure is TEACHER_MEASURE]
    if not rewards or not any(change.verdict == "better" for change in teachers):
        return ()
    if any(change.verdict == "better" for change in rewards):
        return ()
    return ("The teacher finds the answers likelier, but no reward rose: look for a shortcut, or another teacher.",)


def _notices(history: History) -> tuple[str, ...]:
    notices = []
    if history.num_starts > 1:
        resumed_from = history.run.get("resumed_from")
        origin = "from nothing" if resumed_from is None else f"from step {resumed_from:,}"
        notices.append(f"Started {history.num_starts} times, last {origin}.")
    if history.num_lost_steps:
        notices.append(f"{_steps(history.num_lost_steps)} undone by a restart, not counted here.")
    if history.cut_off:
        notices.append("The journal's last line was cut off in mid-writing and is left out.")
    return tuple(notices)
