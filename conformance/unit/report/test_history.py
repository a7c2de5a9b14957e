"""What of a journal still counts; evaluation files, read back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
)
from rollmatch.report.evaluations import Evaluation, load_evaluation
from rollmatch.report.history import load_history, make_history


def step(number, **fields):
    return {"event": "step", "rank": 0, "step": number, **fields}


def numbers(history):
    return [event["step"] for event in history.steps]


def test_a_resume_undoes_what_came_after_its_checkpoint():
    events = [run_event(), *map(step, range(1, 8)), evaluated_event(4), evaluated_event(6), run_event(resumed_from=4)]
    history = make_history([*events, step(5, loss=0.5)])
    assert numbers(history) == [1, 2, 3, 4, 5]
    assert [event["step"] for event in history.evaluations] == [4]
    assert (history.num_lost_steps, history.num_starts) == (3, 2)


def test_a_start_from_nothing_undoes_everything():
    history = make_history([run_event(), evaluated_event(0), step(1), run_event(), step(1, loss=9.0)])
    assert [event["loss"] for event in history.steps] == [9.0]
    assert history.evaluations == ()


def test_rank_0_speaks_for_the_run_and_every_rank_for_its_rollouts():
    generated = {"event": "generated", "step": 1, "num_rollouts": 4}
    judged = [{**generated, "rank": rank, "purpose": "eval"} for rank in (0, 1)]
    events = [{**generated, "rank": 1}, {**generated, "rank": 0}, *judged, step(1, f1=0.5), step(1) | {"rank": 1}]
    history = make_history(events)
    assert [event["rank"] for event in history.others["generated"]] == [0, 1], "without those of evaluations"
    assert [event.get("f1") for event in history.steps] == [0.5]


def test_only_the_last_word_is_an_ending():
    ending = {"event": "interrupted", "rank": 0, "step": 3, "signal": "SIGTERM"}
    assert make_history([run_event(), ending]).ending == ending
    assert make_history([run_event(), ending, run_event(resumed_from=3)]).ending is None


def test_pauses_between_starts_and_clock_jumps_take_no_time():
    times = [("run", 100.0), ("step", 110.0), ("run", 5000.0), ("step", 5005.0), ("step", 4000.0), ("step", None)]
    events = [{"event": kind, "step": at, "resumed_from": at, "time": time} for at, (kind, time) in enumerate(times)]
    assert make_history(events).duration_s == 15.0


@given(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 9).map(lambda n: -n - 1)), max_size=30))
def test_whatever_happens_steps_are_unique_ascending_and_the_latest(script):
    """A number n >= 0 is a step, -n - 1 a resume from n; the history equals a replay by hand."""
    events, alive = [], {}
    for place, number in enumerate(script):
        if number >= 0:
            events.append(step(number, loss=place))
            alive[number] = place
        else:
            events.append(run_event(resumed_from=-number - 1))
            alive = {at: loss for at, loss in alive.items() if at <= -number - 1}
    history = make_history(events)
    assert [(event["step"], event["loss"]) for event in history.steps] == sorted(alive.items())


def test_a_directory_without_a_journal_is_refused(tmp_path):
    with refused("journal-missing", str(tmp_path / "journal.jsonl")):
        load_history(tmp_path)
    write_journal(tmp_path, [])
    assert load_history(tmp_path).steps == ()


@pytest.mark.parametrize(
    ("broken", "mended"),
    [
        ('{"event": "step", "step": 2', '{"event": "step", "step": 2}'),
        ("[]", '{"event": "note"}'),
        ('{"step": 2}', '{"event": "step", "step": 2}'),
        ('{"event": "step"}', '{"event": "step", "step": 2}'),
        ('{"event": "step", "step": true}', '{"event": "step", "step": 1}'),
        ('{"event": "step", "step": 1.0}', '{"event": "step", "step": 1}'),
        ('{"event": "step", "step": -1}', '{"event": "step", "step": 0}'),
        ('{"event": "step", "step": 1, "rank": "0"}', '{"event": "step", "step": 1, "rank": 0}'),
        ('{"event": "run", "resumed_from": "4"}', '{"event": "run", "resumed_from": 4}'),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path, broken, mended):
    first = json.dumps(step(1))
    path = tmp_path / "journal.jsonl"
    path.write_text(f"{first}\n{broken}\n{first}\n", encoding="utf-8")
    with refused("journal-line-broken", f"{path}:2"):
        load_history(tmp_path)
    path.write_text(f"{first}\n{mended}\n{first}\n", encoding="utf-8")
    assert load_history(tmp_path).last_step >= 1


def test_an_unterminated_last_line_is_left_out_and_noted(tmp_path):
    write_journal(tmp_path, [{"event": "unknown", "sky": "blue"}, *step_events(1)])
    path = tmp_path / "journal.jsonl"
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + '{"event": "step", "st', encoding="utf-8")
    history = load_history(tmp_path)
    assert (history.cut_off, numbers(history)) == (True, [1])
    path.write_text(whole, encoding="utf-8")
    assert load_history(tmp_path).cut_off is False


def load(run_dir, **changes) -> Evaluation:
    content = {"truth": [box()], "predicted": [found()]} | changes
    return load_evaluation(write_evaluation(run_dir, 3, [scene(7, **content)]))


def test_a_scene_comes_back_as_written(tmp_path):
    evaluation = load(tmp_path, response_text="<b>")
    (one,) = evaluation.scenes
    assert (evaluation.step, one.sample_id, one.response_text) == (3, 7, "<b>")
    assert one.truth[0].bins == (100, 200, 400, 600)
    assert (one.predicted[0].partner, one.predicted[0].iou, one.f1) == (0, 0.87, 1.0)


@pytest.mark.parametrize(
    ("broken", "mended", "place"),
    [
        ({"truth": [box(bins=(1, 2, 3))]}, {"truth": [box(bins=(1, 2, 3, 4))]}, "scenes.0.truth.0"),
        ({"truth": [box(bins=(1, 2, 3, 1000))]}, {"truth": [box(bins=(1, 2, 3, 999))]}, "scenes.0.truth.0.bins.3"),
        ({"truth": [box(bins=(-1, 2, 3, 4))]}, {"truth": [box(bins=(0, 2, 3, 4))]}, "scenes.0.truth.0.bins.0"),
        (
            {"truth": [box(bins=(1, 2, 3, 4), geometry="poly")]},
            {"truth": [box(bins=(1, 2, 3, 4, 5, 6), geometry="poly")]},
            "scenes.0.truth.0",
        ),
        (
            {"truth": [box(bins=(1, 2, 3, 4, 5, 6, 7), geometry="poly")]},
            {"truth": [box(bins=(1, 2, 3, 4, 5, 6, 7, 8), geometry="poly")]},
            "scenes.0.truth.0",
        ),
        ({"predicted": [found(partner=1)]}, {"predicted": [found(partner=0)]}, "scenes.0"),
        ({"predicted": [found(partner=-1)]}, {"predicted": [found(partner=0)]}, "scenes.0.predicted.0.partner"),
        ({"width": 0}, {"width": 1}, "scenes.0.width"),
    ],
)
def test_a_broken_scene_is_named_by_its_place(tmp_path, broken, mended, place):
    with refused("evaluation-file-broken") as caught:
        load(tmp_path, **broken)
    path = tmp_path / "evaluations/step-000003.json"
    assert (caught.value.code, caught.value.key) == ("evaluation-file-broken", f"{path}:{place}")
    assert len(load(tmp_path, **mended).scenes) == 1


def test_a_file_that_is_no_json_is_named(tmp_path):
    path = write_evaluation(tmp_path, 0, [])
    path.write_text('{"step": 0', encoding="utf-8")
    with refused("evaluation-file-broken", str(path)):
        load_evaluation(path)
    path.write_text('{"step": 0, "scenes": []}', encoding="utf-8")
    assert load_evaluation(path).scenes == ()


@given(num_truth=st.integers(0, 4), num_found=st.integers(0, 4), num_wrong=st.integers(0, 4))
def test_a_scene_scores_twice_the_found_over_all_objects(tmp_path_factory, num_truth, num_found, num_wrong):
    num_found = min(num_found, num_truth)
    predicted = [found(partner=place) for place in range(num_found)] + [found(partner=None)] * num_wrong
    evaluation = load(tmp_path_factory.mktemp("run"), truth=[box()] * num_truth, predicted=predicted)
    total = num_truth + num_found + num_wrong
    assert evaluation.scenes[0].f1 == (2 * num_found / total if total else 1.0)
