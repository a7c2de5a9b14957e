"""Answers of an evaluation side by side: which are shown, in which order."""

from rollmatch.report.answers import MAX_ANSWERS, MAX_WORST, make_answer_rows
from rollmatch.report.evaluations import Answer, Evaluation


def evaluation(step, worths, name="reward"):
    answers = [
        Answer(sample_id=place, response_text=f"{step}/{place}", question=f"q{place}", expected="4", **{name: worth})
        for place, worth in enumerate(worths)
    ]
    return Evaluation(step=step, scenes=(), answers=tuple(answers))


def test_the_most_improved_come_first_and_show_both_answers():
    before, after = evaluation(0, [1.0, 0.0, 0.5]), evaluation(9, [0.0, 1.0, 0.5])
    rows = make_answer_rows(before, after)
    assert [row.sample_id for row in rows] == ["1", "2", "0"]
    assert [(cell.when, cell.text, cell.worth, cell.style) for cell in rows[0].cells] == [
        ("Before", "0/1", "0", "same"),
        ("After", "9/1", "1", "better"),
    ]
    assert [row.cells[1].style for row in rows] == ["better", "same", "worse"]
    assert (rows[0].question, rows[0].expected, rows[0].name) == ("q1", "4", "reward")


def test_of_one_evaluation_the_worst_come_first():
    rows = make_answer_rows(evaluation(3, [1.0, 0.0, None], name="exact"), None)
    assert [(row.sample_id, row.cells[0].worth, row.name) for row in rows] == [
        ("1", "0", "exact"),
        ("2", "-", "exact"),
        ("0", "1", "exact"),
    ]


def test_places_are_kept_for_the_worst_of_many():
    count = 3 * MAX_ANSWERS
    rows = make_answer_rows(evaluation(0, [0.0] * count), evaluation(1, [1.0] * (count - 9) + [-1.0] * 9))
    assert len(rows) == MAX_ANSWERS
    assert [row.cells[1].style for row in rows].count("worse") == MAX_WORST


def test_the_worst_are_at_the_end_where_nothing_changed_and_where_all_fit():
    few = make_answer_rows(evaluation(0, [0.0, 0.5, 1.0]), evaluation(1, [0.0, 0.5, 1.0]))
    assert [row.sample_id for row in few] == ["2", "1", "0"]
    worths = [1.0] * (MAX_ANSWERS - MAX_WORST) + [0.1, 0.9, 0.5]
    rows = make_answer_rows(evaluation(0, [0.0] * len(worths)), evaluation(1, worths))
    assert [row.cells[1].worth for row in rows[-3:]] == ["0.9", "0.5", "0.1"]
