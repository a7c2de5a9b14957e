"""Who was busy when, as a picture."""

import pytest

from conformance.doubles.runs import START_S, run_event, step_events
from rollmatch.report.gantt import LEFT, RIGHT, make_gantt
from rollmatch.report.history import make_history

SECONDS = 10.0


def timeline(step, *, rank=0, calls=None, **changes):
    """Ten seconds: the learner waits 2, syncs 1, learns 7; two servers write for the next step."""
    began = START_S + SECONDS * step
    spans = (("rollout", 0, 2), ("sync", 2, 3), ("learn", 3, 10))
    calls = [[0, began + 3, began + 9, step + 1], [1, began + 3, began + 12, step + 1]] if calls is None else calls
    learner = [[name, began + start, began + end] for name, start, end in spans]
    head = {"event": "timeline", "time": began + SECONDS, "rank": rank, "step": step}
    return {**head, "began": began, "ended": began + SECONDS, "calls": calls, "learner": learner, **changes}


def history_of(num_steps, *more, **overlap):
    overlap = {"rollout_s": 6.0, "learn_s": 7.0, "efficiency": 0.7, "servers_idle": 0.3} | overlap
    steps = [
        event | ({"overlap": overlap, "staleness": {"1": 3, "0": 1}} if event["event"] == "step" else {})
        for step in range(1, num_steps + 1)
        for event in step_events(step)
    ]
    return make_history([run_event(), *steps, *(timeline(step) for step in range(num_steps)), *more])


def test_servers_and_learner_have_a_lane_each_on_one_clock():
    gantt = make_gantt(history_of(2))
    assert [lane.label for lane in gantt.lanes] == ["server 0", "server 1", "learner"]
    first, _ = gantt.lanes[0].bars
    assert (first.kind, first.text) == ("call-1", "rollouts of step 2, 6.00 s")
    assert first.x == gantt.x.place(3.0)
    assert first.width == pytest.approx(gantt.x.place(9.0) - gantt.x.place(3.0), abs=0.01)
    assert [bar.kind for bar in gantt.lanes[2].bars] == ["waits", "sync", "learn"] * 2
    assert [text for _, text in gantt.borders] == ["1", "2"]


def test_lanes_are_24_high_with_bars_that_can_be_seen():
    calls = [(10.25, 10.75), (14.0, 14.001), (15.0, 15.33), (17.0, 16.0)]
    brief = timeline(1, calls=[[0, START_S + begin, START_S + end, 2] for begin, end in calls])
    brief.pop("rank")
    gantt = make_gantt(make_history([run_event(), timeline(0), brief]))
    assert [(lane.y, [(bar.x, bar.width) for bar in lane.bars]) for lane in gantt.lanes] == [
        (8.0, [(211.2, 254.4), (518.6, 21.2), (677.6, 0.6), (720.0, 13.99)]),
        (32.0, [(211.2, 381.6)]),
        (56.0, [(84.0, 84.8), (168.8, 42.4), (211.2, 296.8), (508.0, 84.8), (592.8, 42.4), (635.2, 296.8)]),
    ]
    assert (gantt.borders, gantt.bottom, gantt.height) == (((84.0, "1"), (508.0, "2")), 80.0, 122.0)
    assert gantt.kinds == ("call-1", "call-0", "waits", "sync", "learn")
    texts = ["waits, 2.00 s", "sync, 1.00 s", "learn, 7.00 s"]
    learnt = [f"step {step}: {text}" for step in (1, 2) for text in texts]
    assert [bar.text for bar in gantt.lanes[2].bars] == learnt
    assert [tick.label for tick in gantt.x.ticks] == ["0", "5", "10", "15", "20"]


def test_only_the_last_steps_are_drawn_and_nothing_outside_the_frame():
    gantt = make_gantt(history_of(20))
    assert [text for _, text in gantt.borders] == ["15", "16", "17", "18", "19", "20"]
    for lane in gantt.lanes:
        assert all(bar.x >= LEFT and bar.x + bar.width <= RIGHT + 1 for bar in lane.bars)


def test_every_rank_is_a_learner_and_one_engine_no_numbered_server():
    gantt = make_gantt(history_of(1, timeline(0, rank=1, calls=[])))
    assert [lane.label for lane in gantt.lanes] == ["server 0", "server 1", "learner 0", "learner 1"]
    calls = [[0, START_S + 3, START_S + 9, 1]]
    gantt = make_gantt(make_history([run_event(), timeline(0, calls=calls)]))
    assert [lane.label for lane in gantt.lanes] == ["rollouts", "learner"]
    assert gantt.figures == ()


def test_figures_are_means_and_staleness_is_counted():
    assert make_gantt(history_of(4, sync_s=0.125, learner_idle=float("nan"))).figures == (
        ("rollout R, s", "6.00"),
        ("learning L, s", "7.00"),
        ("sync, s", "0.12"),
        ("servers idle", "30.0%"),
        ("learner idle", "-"),
        ("efficiency, max(R, L) / step", "0.700"),
        ("rollouts 0 steps old", "4"),
        ("rollouts 1 step old", "12"),
    )


def test_a_run_without_timelines_has_no_picture():
    assert make_gantt(make_history([run_event(), *step_events(1)])) is None
    broken = timeline(0, began=None)
    assert make_gantt(make_history([run_event(), broken])) is None
