"""Several runs on one page: their curves, their last figures, and what was configured differently."""

import json

import pytest
import yaml

from conformance.report.runs import evaluated_event, run_event, step_events, write_journal
from conformance.report.test_page import read
from rollmatch.cli.main import main


@pytest.fixture
def runs(tmp_path):
    """Two runs of 20 and 30 steps with other seeds, the second without an evaluation."""
    folders = []
    for name, steps, seed in (("first", 20, 1), ("second", 30, 2)):
        folder = tmp_path / name
        folder.mkdir()
        events = [
            run_event(max_steps=steps),
            *(event for step in range(steps) for event in step_events(step, of=steps)),
        ]
        write_journal(folder, events + ([evaluated_event(20, of=20)] if name == "first" else []))
        (folder / "resolved.yaml").write_text(yaml.safe_dump({"training": {"seed": seed, "max_steps": 9}}))
        folders.append(folder)
    return folders


def compare(runs, out):
    assert main(["compare", *map(str, runs), "--out", str(out)]) == 0
    return out.read_text()


def test_curves_stand_over_each_other(runs, tmp_path):
    text = compare(runs, tmp_path / "page.html")
    read(text)
    hovers = [json.loads(part.partition("<")[0]) for part in text.split('<script type="application/json">')[1:]]
    loss = next(hover for hover in hovers if len(hover["lines"]) == 2)
    assert [line["label"] for line in loss["lines"]] == ["first", "second"]
    assert loss["steps"][-1] == 29
    assert loss["lines"][0]["text"][25] is None


def test_only_what_differs_is_listed(runs, tmp_path):
    text = compare(runs, tmp_path / "page.html")
    assert "training.seed" in text
    assert "training.max_steps" not in text


def test_runs_of_one_name_are_told_apart_by_their_paths(runs, tmp_path):
    other = tmp_path / "elsewhere" / "first"
    other.parent.mkdir()
    runs[1].rename(other)
    assert str(other) in compare([runs[0], other], tmp_path / "page.html")


@pytest.mark.parametrize("number", [1, 7])
def test_two_to_six_runs_are_compared(runs, tmp_path, capsys, number):
    assert main(["compare", *[str(runs[0])] * number, "--out", str(tmp_path / "page.html")]) == 1
    assert "runs-not-comparable" in capsys.readouterr().err


def test_the_page_of_a_run_that_was_cut_off_is_written(runs, capsys):
    with (runs[0] / "journal.jsonl").open("a") as journal:
        journal.write('{"event": "st')
    assert main(["page", str(runs[0])]) == 0
    assert (runs[0] / "run.html").is_file()


def test_a_directory_without_a_journal_is_named(tmp_path, capsys):
    assert main(["page", str(tmp_path)]) == 1
    assert "journal-missing" in capsys.readouterr().err
