"""Answers of evaluations, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollmatch.report.evaluations import Answer, Evaluation
from rollmatch.report.numbers import MISSING

MAX_ANSWERS = 24
MAX_WORST = 8
"""Places kept for the lowest worths at the end, so that the table cannot only flatter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCell:
    """One answer as the page shows it."""

    when: str
    text: str
    worth: str
    style: str
    """``better``, ``worse`` or ``same`` than the answer before; of the only one ``same``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow:
    """A held-out sample with its answer, or the ones before and after training."""

    sample_id: str
    question: str
    expected: str
    name: str
    """Of the worth: reward, or exact."""
    cells: tuple[AnswerCell, ...]


def make_answer_rows(before: Evaluation, after: Evaluation | None) -> tuple[AnswerRow, ...]:
    """The most improved samples first, the worst at the end; of one evaluation the worst first."""
    later = {answer.sample_id: answer for answer in (before if after is None else after).answers}
    both = [(answer, later[answer.sample_id]) for answer in before.answers if answer.sample_id in later]
    if after is None:
        return tuple(_row((last,)) for _, last in sorted(both, key=lambda pair: _worth(pair[1]))[:MAX_ANSWERS])
    by_gain = sorted(both, key=lambda pair: (_worth(pair[0]) - _worth(pair[1]), -_worth(pair[1])))
    worst = sorted(by_gain[MAX_ANSWERS - MAX_WORST :], key=lambda pair: -_worth(pair[1]))[-MAX_WORST:]
    return tuple(_row(pair) for pair in by_gain[: MAX_ANSWERS - MAX_WORST] + worst)


def _worth(answer: Answer) -> float:
    return 0.0 if answer.worth is None else answer.worth


def _row(answers: Sequence[Answer]) -> AnswerRow:
    whens = ("Before", "After") if len(answers) > 1 else ("Answer",)
    gain = _worth(answers[-1]) - _worth(answers[0])
    style = "same" if not gain else "better" if gain > 0 else "worse"
    return AnswerRow(
        sample_id=str(answers[0].sample_id),
        question=answers[0].question,
        expected=answers[0].expected,
        name="exact" if answers[0].reward is None else "reward",
        cells=tuple(
            AnswerCell(
                when=when,
                text=answer.response_text,
                worth=MISSING if answer.worth is None else f"{answer.worth:z.3g}",
                style=style if place else "same",
            )
            for place, (when, answer) in enumerate(zip(whens, answers, strict=True))
        ),
    )
