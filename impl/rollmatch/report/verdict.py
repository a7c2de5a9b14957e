"""What came of a run, in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollmatch.report.history import Event, History
from rollmatch.report.measures import Change, compare


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


def make_verdict(history: History) -> Verdict:
    """Judge by the first and the last evaluation."""
    first = history.evaluations[0] if history.evaluations else None
    last = history.evaluations[-1] if len(history.evaluations) > 1 else None
    changes = compare(_metrics(first), _metrics(last)) if first else ()
    status, status_text = _status(history)
    return Verdict(
        status=status,
        status_text=status_text,
        headline=_headline(history, changes),
        notices=_notices(history),
        before_step=first["step"] if first else None,
        after_step=last["step"] if last else None,
        changes=changes,
    )


def _metrics(event: Event | None) -> Event:
    metrics = event.get("metrics") if event else None
    return metrics if isinstance(metrics, dict) else {}


def _status(history: History) -> tuple[str, str]:
    planned = history.run.get("max_steps")
    done = f"{history.last_step:,} of {planned:,} steps" if type(planned) is int else f"{history.last_step:,} steps"
    if history.ending is None:
        return "unfinished", f"unfinished: {done} so far"
    if history.ending["event"] == "interrupted":
        return "interrupted", f"interrupted by {history.ending.get('signal', 'a signal')}: {done}"
    return "finished", f"finished: {done}"


def _headline(history: History, changes: Sequence[Change]) -> str:
    if not changes:
        return "Not evaluated yet." if history.steps else "No step and no evaluation yet."
    if len(history.evaluations) == 1:
        step = history.evaluations[0]["step"]
        return f"{_now(changes[0])} at step {step:,}; the evaluation to compare with is still to come."
    span = history.evaluations[-1]["step"] - history.evaluations[0]["step"]
    sentence = f"{_moved(changes[0])} in {_steps(span)}."
    invalid = next((change for change in changes if change.measure.key == "invalid_rate"), None)
    return f"{sentence} {_moved(invalid)}." if invalid is not None and invalid.direction else sentence


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


SUBJECTS = {"f1": "F1", "reward": "Mean reward", "invalid_rate": "Invalid responses"}


def _moved(change: Change) -> str:
    subject = SUBJECTS[change.measure.key]
    if change.delta is None:
        return f"{subject} went from {change.before_text} to {change.after_text}"
    if change.direction == 0:
        return f"{subject} stayed at {change.after_text}"
    verb = "rose" if change.direction > 0 else "fell"
    return f"{subject} {verb} from {change.before_text} to {change.after_text}"


def _now(change: Change) -> str:
    return f"{SUBJECTS[change.measure.key]} was {change.before_text}"


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
