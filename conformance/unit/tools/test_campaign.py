"""A short fault campaign: thirty faults of every phase cost a run no sample and no hang, and end it by names only."""

import random

import pytest
from starlette.testclient import TestClient

from conformance.doubles.stand_in import make_stand_in
from conformance.tools.campaign.__main__ import on_doubles
from conformance.tools.campaign.attack import MIB, drawn, swollen
from conformance.tools.campaign.doubles import OF_LEARNER, OF_SERVER, TrialShape, draw, judged
from conformance.tools.campaign.observe import JournalTail, judge_story, name_of_end
from conformance.tools.campaign.small_learner import STEPS, plan_of
from rollmatch.data import StepShape, WindowPlan

LOCKSTEP = TrialShape(mode="off", num_ranks=1, num_servers=1, min_servers=1)


@pytest.mark.wide
def test_thirty_faults_lose_nothing():
    shown = []
    num_faults, num_found = on_doubles(21, num_faults=30, minutes=5, workers=8, show=shown.append)
    assert num_found == 0, "\n".join(shown)
    assert num_faults >= 30


def test_every_phase_and_mode_is_drawn_and_a_seed_repeats_itself():
    drawn = [draw(number, 1) for number in range(100)]
    assert {fault.phase for _, faults in drawn for fault in faults} == OF_SERVER.keys() | OF_LEARNER.keys()
    assert {(shape.mode, shape.num_ranks) for shape, _ in drawn} == {
        (mode, num_ranks) for mode in ("off", "ahead") for num_ranks in (1, 2)
    }
    assert drawn == [draw(number, 1) for number in range(100)]


def learned(step, **fields):
    ids = list(plan_of(1, 0).at(step).sample_indices)
    read = [[step + 1, 100 + index] for index in ids]
    return {"event": "learned", "step": step, "sample_ids": ids, "read": read, "sent": [step] * 3} | fields


def test_the_campaign_finds_what_is_wrong():
    def wrong(*events, ends=("finished",), shape=LOCKSTEP):
        return [" ".join(problem.split()[:2]) for problem in judged([events], ends, shape)]

    whole = [{"event": "run", "resumed_from": 0}, *(learned(step) for step in range(STEPS))]
    assert wrong(*whole) == []
    assert wrong(ends=["hang"]) == ["hang", "not finished"]
    assert wrong(ends=["UNNAMED KeyError: 1", "finished"]) == ["UNNAMED KeyError:"]
    other = [learned(step) | {"sample_ids": learned(0)["sample_ids"]} for step in range(1, STEPS)]
    assert set(wrong(*whole[:2], *other)) == {"rank 0", "step 1,", "step 2,", "step 3,", "samples were"}
    assert wrong(*whole, learned(1)) == ["rank 0"]  # nobody has resumed there
    old = learned(3, sent=[2] * 3, read=[[3, 100 + index] for index in learned(3)["sample_ids"]])
    assert wrong(*whole[:-1], old) == ["step 3,"] * 3
    ahead = TrialShape(mode="ahead", num_ranks=1, num_servers=1, min_servers=1)
    assert wrong(*whole[:-1], old, shape=ahead) == []
    mixed = learned(3, sent=[3] * 3, read=[[3, 100 + index] for index in learned(3)["sample_ids"]])
    assert wrong(*whole[:-1], mixed, shape=ahead) == ["step 3,"] * 3


def test_a_journal_is_followed_and_lines_that_were_cut_are_passed_over(tmp_path):
    tail = JournalTail(tmp_path / "journal.jsonl")
    assert tail.read() == []
    tail.path.write_text('{"event": "step", "step": 1}\n{"event": "st')
    assert [event["step"] for event in tail.read()] == [1]
    tail.path.write_text('{"event": "step", "step": 1}\n{"event": "run"}\n{"event": "step", "step": 2}\n')
    assert (len(tail.read()), tail.num_steps, tail.last_step) == (2, 2, 2)


def test_the_ends_of_processes_have_names():
    error = "rollmatch: 1 problem\n  1. [storage-failed] out: cannot be written\n"
    assert name_of_end(1, error) == "storage-failed"
    assert [name_of_end(code, "") for code in (-9, None, 130)] == ["killed", "killed", "interrupted"]
    unnamed = [(1, ""), (1, error.replace("storage", "strange")), (0, ""), (-11, ""), (3, error)]
    unnamed.append((1, f"Traceback (most recent call last)\n{error}"))
    assert all("UNNAMED" in name_of_end(*end) for end in unnamed)


def test_a_real_run_is_judged_by_its_journal():
    shape = StepShape(batch_size=1, accumulation=3, learner_world_size=1)
    ids = [list(WindowPlan(60, seed=42, shape=shape, rank=0).at(step).sample_indices) for step in range(4)]

    def wrong(*steps, resumed_from=None):
        events = [{"event": "saved", "step": step} for step in (1, 2, 3)] if resumed_from else []
        events.append({"event": "run", "resumed_from": resumed_from})
        events += [{"event": "packed", "step": step, "sample_ids": [[i] for i in ids[step]]} for step in steps]
        timed = [{"time": float(place), "rank": 0} | event for place, event in enumerate(events)]
        return judge_story([timed], mode="off", num_samples=60, accumulation=3)

    assert wrong(0, 1, 2) == []
    assert wrong(2, 3, resumed_from=2) == []
    assert len(wrong(0, 2)) == 1
    assert len(wrong(1, 2, resumed_from=1)) == 1
    ids[1] = ids[0]
    assert len(wrong(0, 1)) == 1


@pytest.mark.wide
def test_bodies_of_every_route_are_drawn_with_counts_and_depths():
    """Each is refused in our form, or is a right call."""
    chance, sizes, statuses = random.Random(3), [], set()
    with TestClient(make_stand_in()[1]) as client:
        schemas = client.get("/openapi.json").json()
        posts = {route: about["post"] for route, about in schemas["paths"].items() if "post" in about}
        bodies = {route: post["requestBody"]["content"] for route, post in posts.items() if "requestBody" in post}
        for route in sorted(bodies):
            body = drawn(bodies[route]["application/json"]["schema"], schemas, chance)
            raw = swollen(body, chance)
            sizes.append(len(raw))
            if "communicator" not in route:
                reply = client.post(route, content=raw, headers={"content-type": "application/json"})
                statuses.add(reply.status_code)
                assert reply.status_code < 400 or {"code", "problem", "remedy"} <= reply.json().keys(), reply.text
    assert max(sizes) > 15 * MIB
    assert max(statuses) < 500
    assert 422 in statuses
