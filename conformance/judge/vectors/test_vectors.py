"""Portable vectors: they are current, hold by other means, and find out wrong implementations in any language."""

import itertools
import json
import sys
from pathlib import Path
from unittest import mock

import pytest

from conformance.judge.vectors import generate
from conformance.judge.vectors.asking import Answers
from conformance.judge.vectors.command import entry_of, exit_code, main
from conformance.judge.vectors.stored import DATA, read_cases
from conformance.judge.vectors.wrong import CASE_OF, MISTAKES
from conformance.tools.specification import read_specification
from rollmatch.cli.main import main as rollmatch
from rollmatch.interop import vector_answers

CASES = {case.name: case for case in read_cases()}
VECTORS = [vector for case in CASES.values() for vector in case.vectors]
OURS = [sys.executable, "-m", "rollmatch", "vectors", "answer"]
PLAIN = [sys.executable, str(DATA.parent / "plain_python.py")]


def run(tmp_path, command, *options):
    """Exit code and report."""
    path = tmp_path / "report.json"
    code = main(["run", "--json", str(path), *options, *command])
    return code, json.loads(path.read_text())


def verdicts(report):
    return {entry["id"]: entry["verdict"] for entry in report["vectors"]}


def program(tmp_path, text):
    """A command that reads all of its input, then runs this text."""
    path = tmp_path / "program.py"
    path.write_text(f"import json, sys\nlines = [json.loads(line) for line in sys.stdin]\n{text}\n")
    return [sys.executable, str(path)]


def answered_by(cases):
    """Entries and exit code of these functions, without a process."""
    with mock.patch.object(vector_answers, "CASES", cases):
        outputs = {
            v.vector_id: vector_answers.answer(case.name, v.given) for case in CASES.values() for v in case.vectors
        }
    answers = Answers(replies={name: {"output": json.loads(json.dumps(output))} for name, output in outputs.items()})
    entries = [entry_of(case, vector, answers, ["x"], "y") for case in CASES.values() for vector in case.vectors]
    return entries, exit_code(entries, answers)


@pytest.mark.scenario(clauses=["judging/an-implementation-proves-itself-by-vectors#3"])
def test_the_committed_vectors_are_those_of_the_seed(tmp_path):
    generate.write(tmp_path)
    fresh, kept = ({path.name: path.read_text() for path in folder.glob("*.json")} for folder in (tmp_path, DATA))
    assert fresh == kept, "run: python -m conformance.judge.vectors.generate"
    assert sum(len(text) for text in kept.values()) < 200_000


@pytest.mark.scenario(clauses=["judging/an-implementation-proves-itself-by-vectors#2"])
def test_every_case_names_clauses_of_the_specification():
    clauses = read_specification().clauses
    assert [one for case in CASES.values() for one in case.clauses if one not in clauses] == []
    assert all(case.clauses for case in CASES.values())


@pytest.mark.scenario(clauses=["judging/an-implementation-proves-itself-by-vectors#6"])
def test_the_reference_answers_every_vector_through_the_protocol(tmp_path):
    code, report = run(tmp_path, OURS)
    assert (code, set(verdicts(report).values()), len(report["vectors"])) == (0, {"pass"}, len(VECTORS))


@pytest.mark.scenario(
    "judging/an-implementation-in-plain-python", clauses=["judging/an-implementation-proves-itself-by-vectors#1,5"]
)
def test_the_example_in_plain_python_passes_its_two_cases(tmp_path):
    """It shares no code with the reference, so that these two cases are right for another reason, too."""
    code, report = run(tmp_path, PLAIN)
    assert code == 3
    assert {entry["case"]: entry["verdict"] for entry in report["vectors"]} == {
        name: "pass" if name in ("seeds", "advantages") else "not-testable" for name in CASES
    }
    assert run(tmp_path, PLAIN, "--only", "seeds", "--only", "advantages/03")[0] == 0


@pytest.mark.scenario(
    "judging/a-wrong-implementation-is-found-out", clauses=["judging/an-implementation-proves-itself-by-vectors#4"]
)
@pytest.mark.parametrize("name", CASE_OF)
def test_a_mistake_is_found_in_its_own_case(name):
    case, mistake = CASE_OF[name]
    entries, code = answered_by({**vector_answers.CASES, case: mistake})
    assert {entry["case"] for entry in entries if entry["verdict"] == "must"} == {case}
    assert code == 1


def test_every_case_has_a_mistake_and_none_is_missed_without():
    assert set(MISTAKES) == set(CASES)
    entries, code = answered_by(vector_answers.CASES)
    assert ({entry["verdict"] for entry in entries}, code) == ({"pass"}, 0)


def test_a_miss_is_reported_with_the_place_and_a_command(tmp_path, capsys):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(Path(PLAIN[1]).read_text().replace("max(len(rewards) - 1, 1)", "max(len(rewards), 1)"))
    command = [sys.executable, str(wrong)]
    code, report = run(tmp_path, command, "--only", "advantages")
    missed = [entry for entry in report["vectors"] if entry["verdict"] == "must"]
    assert code == 1
    assert missed[0]["id"] == "advantages/00"
    assert missed[0]["reason"].startswith("output.advantages[0][0]: expected 0.8658754297607016, got 0.99980003")
    assert missed[0]["reply"]["output"]["advantages"][0][0] == pytest.approx(0.9998, abs=1e-4)
    assert missed[0]["again"].endswith(" --only advantages/00 " + " ".join(command))
    shown = capsys.readouterr().out
    assert all(text in shown for text in (missed[0]["reason"], missed[0]["clauses"][0], missed[0]["again"]))


@pytest.mark.scenario("judging/a-program-that-ends-too-early")
def test_what_a_crash_leaves_unanswered_is_blocked_by_it(tmp_path):
    text = "for line in lines[:2]: print(json.dumps({'id': line['id'], 'unsupported': ''}))\nsys.exit(7)"
    code, report = run(tmp_path, program(tmp_path, text), "--only", "groups")
    assert code == 1
    found = [(entry["verdict"], entry["reason"]) for entry in report["vectors"]]
    assert found[2] == ("must", "no answer: COMMAND ended with code 7")
    assert set(found[3:]) == {("blocked-by", "groups/02")}


@pytest.mark.parametrize(
    ("text", "code", "problem"),
    [
        ("print('hello')", 4, "a line that is not JSON: hello"),
        (
            "print(json.dumps({'id': 'groups/99', 'output': {}}))",
            4,
            'an answer to nothing that was sent: {"id": "groups/99"',
        ),
        (
            "for line in [*lines, lines[0]][-2:] + lines: print(json.dumps({'id': line['id'], 'output': {}}))",
            1,
            "a second answer to groups/00",
        ),
    ],
)
def test_lines_that_are_no_answers_are_problems(tmp_path, text, code, problem):
    found, report = run(tmp_path, program(tmp_path, text), "--only", "groups")
    assert found == code
    assert report["problems"][0].startswith(problem)


def test_a_command_that_cannot_start_or_is_silent_cannot_be_judged(tmp_path, capsys):
    assert run(tmp_path, [str(tmp_path / "nothing")])[0] == 4
    assert "COMMAND cannot be started" in capsys.readouterr().out
    assert (
        run(
            tmp_path, program(tmp_path, "print('why', file=sys.stderr)\nimport time; time.sleep(60)"), "--timeout", "2"
        )[0]
        == 4
    )
    assert "nothing came for 2 s (--timeout)\nwhy" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["run", "--only", "groups/99", "x"], ["run", "--json", "/none/x.json", "x"], []])
def test_wrong_usage_is_exit_2(words):
    with pytest.raises(SystemExit, match="2"):
        main(words)


def test_rollmatch_vectors_is_the_same_command(tmp_path):
    assert rollmatch(["vectors", "run", "--only", "seeds", *PLAIN]) == 0
    assert rollmatch(["vectors", "run", "--only", "groups", *PLAIN]) == 3


def test_pack_and_assign_hold_by_trying_everything():
    """Independent of the reference: all subsets of companions, all one-to-one assignments."""
    for vector in CASES["pack"].vectors:
        if vector.given["num_rows"] is None and "rows" in vector.expected:
            assert vector.expected["rows"] == rows_by_trial(vector.given["lengths"], vector.given["capacity"])
    for vector in CASES["assign"].vectors:
        assert vector.expected["pairs"] == pairs_by_trial(vector.given), vector.vector_id


def rows_by_trial(lengths, capacity):
    waiting, rows = list(range(len(lengths))), []
    while waiting:
        oldest, *younger = waiting
        subsets = [c for size in range(len(younger) + 1) for c in itertools.combinations(younger, size)]
        fitting = [c for c in subsets if sum(lengths[i] for i in c) <= capacity - lengths[oldest]]
        fullest = max(sum(lengths[i] for i in c) for c in fitting)
        rows.append([oldest, *min(c for c in fitting if sum(lengths[i] for i in c) == fullest)])
        waiting = [index for index in waiting if index not in rows[-1]]
    return rows


def pairs_by_trial(given):
    ious, rules = given["ious"], given["rules"]
    num_truth = len(ious[0])
    choices = [
        [
            column
            for column in range(num_truth)
            if given["candidates"][row][column] and values[column] >= rules["maskiou_gate"]
        ]
        + [num_truth]
        for row, values in enumerate(ious)
    ]
    costs = {}
    for columns in itertools.product(*choices):
        taken = [column for column in columns if column < num_truth]
        if len(set(taken)) == len(taken):
            pairs = sum(round((1 - ious[row][c]) * 10**9) for row, c in enumerate(columns) if c < num_truth)
            alone = (len(columns) - len(taken)) * rules["fp_cost"] + (num_truth - len(taken)) * rules["fn_cost"]
            costs[columns] = pairs + round(alone * 10**9)
    best = min(columns for columns in costs if costs[columns] == min(costs.values()))
    return [[row, column] for row, column in enumerate(best) if column < num_truth]
