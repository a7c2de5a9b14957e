"""What of a journal still counts."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.report.runs import evaluated_event, run_event, step_events, write_journal
from rollmatch.report.history import JournalLineBroken, JournalMissing, load_history, make_history


def step(number, **fields):
    return {"event": "step", "rank": 0, "step": number, **fields}


def numbers(history):
    return [event["step"] for event in history.steps]


def test_the_later_of_two_events_of_a_step_wins():
    history = make_history([step(1, loss=3.0), step(2, loss=2.0), step(1, loss=1.0)])
    assert [(event["step"], event["loss"]) for event in history.steps] == [(1, 1.0), (2, 2.0)]


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
    history = make_history([{**generated, "rank": 1}, {**generated, "rank": 0}, step(1, f1=0.5), step(1) | {"rank": 1}])
    assert len(history.others["generated"]) == 2
    assert [event.get("f1") for event in history.steps] == [0.5]


def test_only_the_last_word_is_an_ending():
    ending = {"event": "interrupted", "rank": 0, "step": 3, "signal": "SIGTERM"}
    assert make_history([run_event(), ending]).ending == ending
    assert make_history([run_event(), ending, run_event(resumed_from=3)]).ending is None


def test_pauses_between_starts_and_clock_jumps_take_no_time():
    times = [("run", 100.0), ("step", 110.0), ("run", 5000.0), ("step", 5005.0), ("step", 4000.0), ("step", None)]
    events = [{"event": kind, "step": at, "resumed_from": at, "time": time} for at, (kind, time) in enumerate(times)]
    assert make_history(events).duration_s == 15.0


@settings(deadline=None)
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
    with pytest.raises(JournalMissing) as caught:
        load_history(tmp_path)
    assert (caught.value.code, caught.value.key) == ("journal-missing", str(tmp_path / "journal.jsonl"))
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
    with pytest.raises(JournalLineBroken) as caught:
        load_history(tmp_path)
    assert (caught.value.code, caught.value.key) == ("journal-line-broken", f"{path}:2")
    path.write_text(f"{first}\n{mended}\n{first}\n", encoding="utf-8")
    assert load_history(tmp_path).last_step >= 1


def test_an_unterminated_last_line_is_left_out_and_told(tmp_path):
    write_journal(tmp_path, step_events(1))
    path = tmp_path / "journal.jsonl"
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + '{"event": "step", "st', encoding="utf-8")
    history = load_history(tmp_path)
    assert (history.cut_off, numbers(history)) == (True, [1])
    path.write_text(whole, encoding="utf-8")
    assert load_history(tmp_path).cut_off is False


def test_unknown_events_pass(tmp_path):
    write_journal(tmp_path, [{"event": "weather", "sky": "blue"}, step(1)])
    assert numbers(load_history(tmp_path)) == [1]
