"""Why predicted objects were dropped: a table of reasons."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollmatch.report.history import Event, History
from rollmatch.report.numbers import finite, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRow:
    """One reason, most frequent first; the halves tell whether it got rarer."""

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
            share=round(total / totals.total(), 4),
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
