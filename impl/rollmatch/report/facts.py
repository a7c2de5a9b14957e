"""Facts about a run, why predicted objects were dropped, and what was written while training."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from rollmatch.records import rounded
from rollmatch.report.history import Event, History
from rollmatch.report.numbers import compact, duration, finite, percent, plain

MOST_GROUPS = 12
"""Groups of training completions on the page, spread over the steps."""
Facts = tuple[tuple[str, str], ...]


def make_facts(history: History) -> Facts:
    """Facts of the whole journal, in reading order; the unknown ones are left out."""
    others = history.others
    return (
        *run_facts(history.run),
        *_known(
            ("Started", _when(history.started_at)),
            ("Time under way", duration(history.duration_s) if history.duration_s else ""),
            ("Rollouts", _rollouts(others["generated"])),
            ("Learnt from", _learnt(others["packed"], history.run)),
            ("Packing", _packing(others["packed"])),
            ("Weight sync", _sync(others["synced"])),
            ("GPU memory", _gpu_memory(history.steps)),
            ("Servers", "; ".join(f"{server} {verb} after step {step:,}" for server, verb, step in history.roster)),
            ("Decoding", _pairs((others["requested"] or ({},))[-1].get("decoding"))),
            ("Last checkpoint", _text((others["saved"] or ({},))[-1].get("path"))),
        ),
    )


def run_facts(run: Event) -> Facts:
    """Facts of a ``run`` event, known before the first step."""
    max_steps, resumed_from = finite(run.get("max_steps")), finite(run.get("resumed_from"))
    return _known(
        ("Model", _text(run.get("model"))),
        ("Parameters", _parameters(run)),
        ("Device", _device(run)),
        ("Samples", _samples(run)),
        ("Steps", "" if max_steps is None else plain(max_steps, digits=0)),
        ("Resumed from", "" if resumed_from is None else f"step {plain(resumed_from, digits=0)}"),
        ("Config", _text(run.get("config_path"))),
        ("Versions", _pairs(run.get("versions"))),
    )


def _known(*facts: tuple[str, str]) -> Facts:
    return tuple((label, text) for label, text in facts if text)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _pairs(value: object) -> str:
    """Names and values of a mapping on one line.

    >>> _pairs({"temperature": 0.7, "top_p": 1.0})
    'temperature 0.7, top_p 1.0'
    """
    return ", ".join(f"{name} {_text(item)}" for name, item in value.items()) if isinstance(value, dict) else ""


def _parameters(run: Event) -> str:
    num_parameters, num_trainable = finite(run.get("num_parameters")), finite(run.get("num_trainable"))
    if num_parameters is None:
        return ""
    if num_trainable is None or num_parameters <= 0:
        return compact(num_parameters)
    share = "all" if num_trainable == num_parameters else percent(num_trainable / num_parameters)
    return f"{compact(num_parameters)}, {compact(num_trainable)} trained ({share})"


def _device(run: Event) -> str:
    size = run.get("learner_world_size")
    device = _text(run.get("device"))
    return f"{device} x {size}" if device and type(size) is int and size > 1 else device


def _when(unix_seconds: float | None) -> str:
    if unix_seconds is None or not 0 <= unix_seconds < 4e9:
        return ""
    return f"{datetime.fromtimestamp(unix_seconds, tz=UTC):%Y-%m-%d %H:%M} UTC"


def _samples(run: Event) -> str:
    evaluated, validation = run.get("num_eval_samples"), run.get("num_val_samples")
    kind = "validation" if evaluated in (None, validation) else f"validation ({plain(evaluated, digits=0)} evaluated)"
    if validation == 0:
        return f"{plain(run.get('num_train_samples'), digits=0)} training, none to evaluate"
    counts = [(run.get("num_train_samples"), "training"), (validation, kind)]
    return ", ".join(f"{plain(count, digits=0)} {kind}" for count, kind in counts if count is not None)


def _numbers(events: Sequence[Event], name: str) -> list[float]:
    return [number for event in events if (number := finite(event.get(name))) is not None]


def _rollouts(generated: Sequence[Event]) -> str:
    num_rollouts, num_tokens = _numbers(generated, "num_rollouts"), _numbers(generated, "num_tokens")
    return f"{plain(sum(num_rollouts), digits=0)} with {compact(sum(num_tokens))} tokens" if num_rollouts else ""


def _learnt(packed: Sequence[Event], run: Event) -> str:
    """Different samples in all steps' micro-batches.

    >>> _learnt([{"sample_ids": [[0, 3], [3]]}, {"sample_ids": [[5]]}], {"num_train_samples": 8})
    '3 of 8 samples'
    """
    rows = [row for event in packed for row in event.get("sample_ids") or ()]
    seen, whole = {str(one) for row in rows for one in row}, finite(run.get("num_train_samples"))
    return f"{len(seen):,} of {plain(whole, digits=0)} samples" if seen and whole is not None else ""


def _packing(packed: Sequence[Event]) -> str:
    """Rows of all steps, and what has not been learnt.

    >>> _packing([{"rows": 1, "segments": 6, "fill": 0.9, "carried": 2}, {"rows": 2, "segments": 8, "fill": 0.7}])
    '14 segments in 3 rows, 80% full (median)'
    >>> _packing([{"rows": 2, "segments": 6, "fill": 0.9, "carried": 2}])
    '6 segments in 2 rows, 90% full (median); 2 waited after the last step'
    """
    fill = _numbers(packed, "fill")
    if not fill:
        return ""
    rows, segments = sum(_numbers(packed, "rows")), sum(_numbers(packed, "segments"))
    rows_of = f"{plain(segments, digits=0)} segments in {plain(rows, digits=0)} rows, {median(fill):.0%} full (median)"
    waiting = finite(packed[-1].get("carried"))
    return f"{rows_of}; {plain(waiting, digits=0)} waited after the last step" if waiting else rows_of


def _gpu_memory(steps: Sequence[Event]) -> str:
    """Of rank 0.

    >>> _gpu_memory([{"gpu_memory": {"peak_gb": 93.9, "layers": 36, "kept_layers": 12}}])
    'peak 93.9 GB in tensors; 12 of 36 layers kept their activations in the last step'
    >>> _gpu_memory([{"loss": 0.5}])
    ''
    """
    figures = steps[-1].get("gpu_memory") if steps else None
    if not isinstance(figures, dict):
        return ""
    peak = f"peak {plain(figures.get('peak_gb'), digits=1)} GB in tensors"
    kept, layers = (plain(figures.get(name), digits=0) for name in ("kept_layers", "layers"))
    of_layers = f"{kept} of {layers} layers kept their activations in the last step"
    return f"{peak}; {of_layers}" if "layers" in figures else peak


def _sync(synced: Sequence[Event]) -> str:
    seconds, num_bytes = _numbers(synced, "seconds"), _numbers(synced, "num_bytes")
    if not seconds or not any(num_bytes):  # backend hf generates with the learner's weights
        return ""
    mode = _text(synced[-1].get("mode"))
    return f"{mode} {len(synced):,} times, {compact(median(num_bytes))}B in {median(seconds):.3g} s (median)".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRow:
    """One reason, most frequent first, with counts of the first and second half of the steps."""

    reason: str
    total: int
    first_half: int
    second_half: int
    share: float
    share_text: str


def make_drop_rows(history: History) -> tuple[DropRow, ...]:
    """Dropped elements by reason, over all steps and over the two halves of them."""
    middle = len(history.steps) // 2
    first, second = _count(history.steps[:middle]), _count(history.steps[middle:])
    totals = first + second
    return tuple(
        DropRow(
            reason=reason,
            total=total,
            first_half=first[reason],
            second_half=second[reason],
            share=rounded(total / totals.total()),
            share_text=percent(total / totals.total()),
        )
        for reason, total in sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    )


def _count(events: Sequence[Event]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for event in events:
        drops = event.get("drops")
        for reason, count in drops.items() if isinstance(drops, dict) else ():
            number = finite(count)
            if number is not None and number > 0:
                counts[str(reason)] += int(number)
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRow:
    """A training completion as the page shows it."""

    worth: str
    """Reward or F1, if the objective has one."""
    ending: str
    """Tokens, and why it ended."""
    text: str
    columns: tuple[tuple[str, str], ...] = ()
    """Name and text of what reward functions wrote down of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionGroup:
    """The completions of one prompt in one step."""

    step: int
    sample_id: str
    question: str
    expected: str
    rows: tuple[CompletionRow, ...]


def make_completion_groups(history: History) -> tuple[CompletionGroup, ...]:
    """Groups of the first step, of the last one, and of steps between them."""
    groups = [
        CompletionGroup(
            step=event["step"] + 1,  # as the lines of a run count
            sample_id=sample_id,
            question=_text(members[0].get("question")),
            expected=_text(members[0].get("expected")),
            rows=tuple(map(_completion_row, members)),
        )
        for event in history.others["completions"]
        for sample_id, members in _by_sample(_mappings(event.get("completions"))).items()
    ]
    return tuple(groups[place] for place in spread(len(groups), MOST_GROUPS))


def _completion_row(one: dict[str, object]) -> CompletionRow:
    columns = one.get("columns")
    columns = columns if isinstance(columns, dict) else {}
    return CompletionRow(
        worth=", ".join(f"{name} {plain(value)}" for name, value in _worth_of(one)),
        ending=f"{_text(one.get('num_tokens'))} tokens, {_text(one.get('finish_reason'))}",
        text=_text(one.get("text")),
        columns=tuple((str(name), _text(value)) for name, value in columns.items()),
    )


def _by_sample(completions: Sequence[dict[str, object]]) -> dict[str, list[dict[str, object]]]:
    groups: dict[str, list[dict[str, object]]] = {}
    for one in completions:
        groups.setdefault(_text(one.get("sample_id")), []).append(one)
    return groups


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` places, the first and the last among them.

    >>> spread(3, 5), spread(9, 3), spread(0, 4)
    ([0, 1, 2], [0, 4, 8], [])
    """
    return list(range(count)) if count <= most else [place * (count - 1) // (most - 1) for place in range(most)]


def _mappings(value: object) -> list[dict[str, object]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _worth_of(one: dict[str, object]) -> list[tuple[str, float]]:
    worth = one.get("worth")
    named = worth.items() if isinstance(worth, dict) else ()
    return [(str(name), number) for name, value in named if (number := finite(value)) is not None]
