"""The page of a run and that of several: complete, offline, harmless, whatever the runs were."""

import json
import re
from itertools import chain

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.doubles.page_outline import read, visible
from conformance.doubles.refusals import refused
from conformance.doubles.runs import (
    box,
    evaluated_event,
    found,
    run_event,
    scene,
    step_events,
    write_evaluation,
    write_journal,
    write_run,
)
from rollmatch.cli.main import main
from rollmatch.report import write_page
from rollmatch.report.facts import make_drop_rows
from rollmatch.report.history import load_history

GEOMETRY = frozenset({"d", "x", "y", "cx", "cy", "r", "points", "viewbox", "width", "height"})


def page(run_dir):
    path = write_page(run_dir)
    assert path == run_dir / "run.html"
    return path.read_text(encoding="utf-8")


def assert_sound(text):
    """Well nested, nothing fetched, every coordinate a finite number."""
    assert text.startswith("<!DOCTYPE html>")
    for tag, attributes in read(text).tags:
        for name in ("src", "href", "srcset", "poster", "action", "data", "xlink:href"):
            assert attributes.get(name, "data:").startswith("data:")
        assert tag not in {"iframe", "object", "embed", "base"}
        for name in GEOMETRY & attributes.keys():
            assert not re.search(r"nan|inf|none|e[+-]?\d|[^-\d.,\sMLHVhvz]", attributes[name], re.IGNORECASE), (
                attributes
            )
        for number in re.findall(r"(?:left|top|width):([^;%]*)%", attributes.get("style", "")):
            assert 0 <= float(number) <= 100
    assert "url(" not in text
    assert "@import" not in text


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return page(write_run(tmp_path_factory.mktemp("runs") / "digits"))


def test_a_whole_run_makes_a_sound_page(whole):
    assert_sound(whole)
    tags = read(whole).tags
    layers = {attributes["data-layer"] for _, attributes in tags if "data-layer" in attributes}
    assert layers == {"truth", "matched", "unmatched", "labels"}
    assert {"0 0 460 230"} <= {attributes.get("viewbox") for _, attributes in tags}
    assert all(f".hide-{layer} " in whole for layer in layers), "each control has something to control"
    assert whole.count('src="data:image/png;base64,') == whole.count('class="canvas pixelated"') == 6
    policy = next(a["content"] for _, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert {"default-src 'none'", "img-src data:"} <= {part.strip() for part in policy.split(";")}


def test_a_page_is_readable_by_its_owner_only(tmp_path):
    assert write_page(write_run(tmp_path / "digits")).stat().st_mode & 0o777 == 0o600


def test_what_the_policy_wrote_before_and_after_stand_beside_each_other(tmp_path):
    run = write_run(tmp_path / "run", num_scenes=1)
    for step, answer in ((0, "written before"), (60, "written after")):
        write_evaluation(run, step, [scene(response_text=answer)])
    text = visible(page(run))
    assert 0 < text.index("written before") < text.index("written after")


@pytest.mark.parametrize(
    "figure",
    [
        "F1 rose from 0.120 to 0.820 in 60 steps.",
        "finished: 60 of 60 steps",
        "F1, desc too 0.050 0.650 +0.600 better",
        "Invalid lower is better 42.0% 0.0% -42.0 pp better",
        "learn 2.40 2 min 24 s 64.0%",
        "bad-geometry 88 30 118",
        "models/tiny-qwen3-vl",
        "torch 2.13.0, vllm 0.32.0",
        "checkpoint-60",
        "total 0.900",
        "tok/s 2.91k",
        "Sample 2 F1 0.00 &rarr; 1.00 +1.00",
        "seven 0.87",
        "training: seed: 7",
    ],
)
def test_the_page_holds_the_journals_figures(whole, figure):
    assert figure in visible(whole)


def test_hostile_text_stays_text(tmp_path):
    evil = "<script>alert(1)</script>\"'&<img src=x onerror=alert(1)>"
    events = [run_event() | {"model": evil, "versions": {evil: evil}}, *step_events(1)]
    events[-1] = events[-1] | {"drops": {evil: 3}}
    write_journal(tmp_path, [*events, evaluated_event(0)])
    texts = {"response_text": evil, "image": evil}
    write_evaluation(tmp_path, 0, [scene(evil, truth=[box(evil)], predicted=[found(evil)], **texts)])
    (tmp_path / "resolved.yaml").write_text(evil, encoding="utf-8")
    text = page(tmp_path)
    assert_sound(text)
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 8


@pytest.mark.parametrize("num_steps", [0, 1, 2, 39, 500])
def test_any_length_of_run_makes_a_sound_page(tmp_path, num_steps):
    text = page(write_run(tmp_path / "run", num_steps=num_steps, num_scenes=1))
    assert_sound(text)
    assert len(text) < 400_000


def test_a_run_that_has_only_begun_makes_a_page(tmp_path):
    empty = page(write_journal(tmp_path / "empty", []))
    assert_sound(empty)
    assert "No step and no evaluation yet." in visible(empty)
    begun = page(write_journal(tmp_path / "begun", [run_event()]))
    assert "unfinished: 0 of 60 steps so far" in visible(begun)
    measured = page(write_journal(tmp_path / "measured", [run_event(), evaluated_event(0)]))
    assert_sound(measured)
    assert "Measured step 0" in visible(measured)
    assert "Change" not in visible(measured)


def test_what_is_missing_leaves_a_note_and_the_rest_is_shown(tmp_path):
    write_run(tmp_path)
    (tmp_path / "evaluations/step-000000.json").unlink()
    text = page(tmp_path)
    assert_sound(text)
    assert "evaluations/step-000000.json is not there" in visible(text)
    assert "Sample 0 F1 1.00" in visible(text)
    write_evaluation(tmp_path, 0, [scene(41, image="images/gone.png")])
    write_journal(tmp_path, [evaluated_event(0) | {"file": "/elsewhere/run/evaluations/step-000000.json"}])
    text = visible(page(tmp_path))
    assert "Sample 41" in text, "a run directory that was moved"
    assert "images/gone.png could not be read" in text


def test_a_failed_page_leaves_the_old_one(tmp_path):
    write_run(tmp_path)
    old = page(tmp_path)
    (tmp_path / "journal.jsonl").unlink()
    with refused("journal-missing", str(tmp_path / "journal.jsonl")):
        write_page(tmp_path)
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == old
    assert not list(tmp_path.glob("*.tmp"))
    assert (tmp_path / "run.html").stat().st_mode & 0o777 == 0o600, "samples are for the run's owner"


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=5), inner, max_size=2)),
    max_leaves=4,
)


def mangled(make_event):
    """The event of any step with some fields gone and some holding anything."""
    free = sorted(make_event(1).keys() - {"event", "step", "rank", "resumed_from", "file"})
    changes = st.dictionaries(st.sampled_from(free), json_values, max_size=4)
    return st.builds(
        lambda step, gone, changed: {
            name: value for name, value in (make_event(step) | changed).items() if name not in gone
        },
        *(st.integers(0, 40), st.sets(st.sampled_from(free)), changes),
    )


SOMETIMES = {"gpu_memory": {"peak_gb": 9.5, "layers": 4, "kept_layers": 2}, "staleness": {"0": 3, "2": 1}}
SOMETIMES |= {"overlap": {"rollout_s": 1.0, "learn_s": 2.0, "efficiency": 0.5}, "reward": 0.5, "entropy": 1.5}
steps = [mangled(lambda number, kind=kind: step_events(number)[kind]) for kind in range(len(step_events(1)))]
steps.append(mangled(lambda number: step_events(number)[-1] | SOMETIMES))
runs = mangled(lambda number: run_event(resumed_from=number or None))
stale = st.one_of(json_values, st.dictionaries(st.sampled_from(["0", "2", "x"]), json_values, max_size=2))
overlapping = st.builds(lambda some: step_events(1)[-1] | SOMETIMES | {"staleness": some}, stale)
journals = st.lists(st.one_of(*steps, overlapping, mangled(evaluated_event), runs), max_size=10)
timeline = {"event": "timeline", "time": 1_750_000_009.0, "rank": 0, "step": 1, "began": 1.0, "ended": 3.0}
journals |= journals.map(
    lambda events: [*events, timeline | {"calls": [[0, 1.0, 2.0, 1]], "learner": [["learn", 1.0, 2.0]]}]
)


@settings(max_examples=settings.default.max_examples // 2)  # each writes a page
@given(journals)
def test_whatever_fields_hold_the_page_is_sound(tmp_path_factory, events):
    assert_sound(page(write_journal(tmp_path_factory.mktemp("run"), events)))


@pytest.fixture
def two_runs(tmp_path):
    """Two runs of 20 and 30 steps; other seeds, and one key that only the second has, which has no evaluation."""
    folders = []
    for name, steps, seed in (("first", 20, 1), ("second", 30, 2)):
        events = [run_event(max_steps=steps), *chain(*(step_events(step, of=steps) for step in range(steps)))]
        if name == "first":
            events = [events[0], evaluated_event(0, of=20), *events[1:], evaluated_event(20, of=20)]
        folder = write_journal(tmp_path / name, events)
        own = {"data": {"shuffle": False}} if name == "second" else {}
        (folder / "resolved.yaml").write_text(yaml.safe_dump({"training": {"seed": seed, "max_steps": 9}, **own}))
        folders.append(folder)
    return folders


def compare(two_runs, out):
    assert main(["compare", *map(str, two_runs), "--out", str(out)]) == 0
    return out.read_text()


def test_a_setting_of_a_run_in_the_middle_is_compared(two_runs, tmp_path):
    first, second = map(str, two_runs)
    assert main(["compare", first, second, first, "--out", str(tmp_path / "page.html")]) == 0
    assert "training.seed" in (tmp_path / "page.html").read_text()


def test_drops_are_counted_in_two_halves_of_the_steps(tmp_path):
    """The first half of three steps is one."""
    steps = [step_events(step)[-1] | {"drops": {"a": 10**step, "b": 3}} for step in range(3)]
    rows = make_drop_rows(load_history(write_journal(tmp_path, [run_event(), *steps])))
    assert [(row.reason, row.first_half, row.second_half, row.total) for row in rows] == [
        ("a", 1, 110, 111),
        ("b", 3, 6, 9),
    ]


def test_curves_stand_over_each_other_beside_what_differs(two_runs, tmp_path):
    text = compare(two_runs, tmp_path / "page.html")
    read(text)
    hovers = [json.loads(part.partition("<")[0]) for part in text.split('<script type="application/json">')[1:]]
    loss = next(hover for hover in hovers if len(hover["lines"]) == 2)
    assert [line["label"] for line in loss["lines"]] == ["first", "second"]
    assert loss["steps"][-1] == 29
    assert loss["lines"][0]["text"][25] is None
    assert "training.seed" in text
    assert "training.max_steps" not in text
    shown = visible(text)
    assert "training.seed 1 2" in shown
    assert "data.shuffle - False" in shown
    assert "data.shuffle False -" in visible(compare(two_runs[::-1], tmp_path / "page.html"))
    assert "optimizer steps 20 30" in shown
    assert re.search(r"time 1 min \d+ s 1 min \d+ s", shown)
    assert "recall 0.8 -" in shown


def test_runs_of_one_name_are_distinguished_by_their_paths(two_runs, tmp_path):
    other = tmp_path / "elsewhere" / "first"
    other.parent.mkdir()
    two_runs[1].rename(other)
    assert str(other) in compare([two_runs[0], other], tmp_path / "page.html")


@pytest.mark.parametrize("number", [1, 7])
def test_two_to_six_runs_are_compared(two_runs, tmp_path, capsys, number):
    assert main(["compare", *[str(two_runs[0])] * number, "--out", str(tmp_path / "page.html")]) == 1
    assert "runs-not-comparable" in capsys.readouterr().err
    assert main(["compare", *[str(two_runs[0])] * 6, "--out", str(tmp_path / "page.html")]) == 0


def test_the_page_of_a_run_that_was_cut_off_is_written(two_runs, capsys):
    with (two_runs[0] / "journal.jsonl").open("a") as journal:
        journal.write('{"event": "st')
    assert main(["page", str(two_runs[0])]) == 0
    assert (two_runs[0] / "run.html").is_file()


def test_a_page_that_cannot_be_written_is_named_and_leaves_nothing(two_runs, tmp_path, capsys):
    for out in (tmp_path / "gone/page.html", tmp_path):
        assert main(["compare", *map(str, two_runs), "--out", str(out)]) == 1
        assert f"[output-not-writable] {out}: " in capsys.readouterr().err
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.parent.glob("*.tmp"))


def test_a_comparison_has_no_rows_of_zeros(tmp_path):
    runs = []
    for name, drops in (("one", 0.0), ("two", 0.0)):
        metrics = {"drop/bad_geometry": drops, "drop/unknown_key": float(name == "two")}
        runs.append(write_journal(tmp_path / name, [run_event(), *step_events(1), evaluated_event(1, **metrics)]))
    text = visible(compare(runs, tmp_path / "page.html"))
    assert "drop/unknown_key" in text
    assert "drop/bad_geometry" not in text
