"""The judge of events passes what kept the fence, and finds each broken rule."""

import pytest

from conformance.tools.judge import judge


def step(number, *, time, rank=0, version=None):
    """One step of one rank: a sync of 1 s, a request, a generation of 2 s."""
    version = number + 1 if version is None else version
    head = {"rank": rank, "step": number}
    return [
        {"event": "barrier", "time": time, **head},
        {"event": "synced", "time": time + 1, "version": version, "seconds": 1.0, **head},
        {"event": "barrier", "time": time + 1, **head},
        {"event": "requested", "time": time + 1, **head},
        {"event": "generated", "time": time + 3, "policy_version": version, "seconds": 2.0, **head},
    ]


def rules_of(events):
    return {breach.rule for breach in judge(events)}


def spoiled(place, **changes):
    events = [*step(0, time=0), *step(1, time=10)]
    events[place] = {**events[place], **changes}
    return [event for event in events if event["event"]]


def test_runs_of_one_and_two_ranks_that_kept_the_fence():
    assert judge([*step(0, time=0), *step(1, time=10)]) == []
    assert judge([*step(0, time=0), *step(0, time=0, rank=1), *step(1, time=10), *step(1, time=10, rank=1)]) == []
    resumed = [*step(0, time=0), {"event": "run", "time": 20, "rank": 0}, *step(5, time=30, version=1)]
    assert judge(resumed) == []


def test_versions_go_on_from_those_of_an_earlier_run_and_are_the_same_for_all_ranks():
    served = [*step(0, time=0, version=4), *step(1, time=10, version=5)]
    other = [*step(0, time=0, rank=1, version=4), *step(1, time=10, rank=1, version=5)]
    assert judge(served) == judge([*served, *other]) == []
    assert rules_of([*served, *step(0, time=0, rank=1), *step(1, time=10, rank=1)]) == {"version"}


def test_versions_go_on_from_that_of_a_server_that_joins_and_from_no_other():
    def joined(version):
        return {"event": "server_joined", "time": 5, "rank": 0, "policy_version": version}

    first, two = step(0, time=0), [*step(1, time=10, version=8), *step(2, time=20, version=9)]
    other = [{**event, "rank": 1} for event in (*first, *two)]
    assert judge([*other, *first, joined(7), *two]) == []
    assert judge([*first, joined(0), *step(1, time=10)]) == []
    assert all(rules_of([*first, event, *two]) == {"version"} for event in (joined(6), joined(8)))
    assert rules_of([*first, joined(0), *step(1, time=10, version=1)]) >= {"version"}


@pytest.mark.parametrize(
    ("place", "changes", "rule"),
    [
        (1, {"version": 2}, "version"),
        (1, {"version": 0}, "version"),
        (6, {"version": 3}, "version"),
        (6, {"step": 0}, "once-per-step"),
        (3, {"event": ""}, "needless-sync"),
        (6, {"event": ""}, "sync-before-request"),
        (9, {"policy_version": 1}, "newest-weights"),
        (4, {"time": 12}, "fence"),
    ],
)
def test_each_broken_rule_is_found(place, changes, rule):
    assert rule in rules_of(spoiled(place, **changes))


def test_a_rank_that_misses_a_barrier_is_found():
    other = [event for event in step(0, time=0, rank=1) if event["event"] != "barrier"]
    (breach,) = judge([*step(0, time=0), *other])
    assert (breach.rule, breach.rank) == ("barriers", 1)


def test_one_rank_may_not_generate_while_another_syncs():
    late = step(1, time=11, rank=1, version=1)
    assert "fence" in rules_of([*step(0, time=10), *late])


def test_an_event_that_lacks_a_field_is_no_evidence():
    (breach,) = judge([{"event": "synced", "time": 1, "rank": 0, "step": 0}])
    assert (breach.rule, breach.problem) == ("schema", "synced lacks version, seconds")


def ahead(number, *, time, asked=None, version=None, call=None):
    """One step that asks for the next one's rollouts and learns from those that came."""
    head = {"rank": 0, "step": number}
    begin, end = call or (time + 1, time + 4)
    return [
        {"event": "synced", "time": time + 1, "version": number + 1, "seconds": 1.0, **head},
        {"event": "requested", "time": time + 1, "rank": 0, "step": number + 1 if asked is None else asked},
        {"event": "generated", "time": time + 1, "policy_version": version or max(1, number), "seconds": 5.0, **head},
        {"event": "timeline", "time": time + 5, "calls": [[0, begin, end, number + 1]], **head},
    ]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"asked": 4}, "sync-before-request"),
        ({"version": 1}, "newest-weights"),
        ({"version": 4}, "newest-weights"),
        ({"call": (15.0, 20.5)}, "fence"),
    ],
)
def test_a_run_that_requests_ahead_is_judged_by_its_staleness(changes, rule):
    first = [*ahead(0, time=0), *ahead(1, time=10)]
    assert judge([*first, *ahead(2, time=20)], max_staleness=1) == []
    spoiled = [*first, *ahead(2, time=20, **changes)]
    assert rule in {breach.rule for breach in judge(spoiled, max_staleness=1)}
    assert judge([*first, *ahead(2, time=20)]) != []
