"""A short fault campaign: thirty faults of every phase cost a run no sample and no hang, and end it by names only."""

from conformance.campaign.__main__ import on_doubles
from conformance.campaign.doubles import OF_LEARNER, OF_SERVER, TrialShape, draw, judged
from conformance.campaign.small_learner import STEPS, plan_of

LOCKSTEP = TrialShape(mode="off", num_ranks=1, num_servers=1, min_servers=1)


def test_thirty_faults_lose_nothing():
    shown = []
    num_faults, num_found = on_doubles(21, num_faults=30, minutes=5, workers=8, show=shown.append)
    assert num_found == 0, "\n".join(shown)
    assert num_faults >= 30


def test_every_phase_and_mode_is_drawn_and_a_seed_repeats_itself():
    drawn = [draw(number, 1) for number in range(100)]
    assert {fault.phase for _, faults in drawn for fault in faults} == OF_SERVER.keys() | OF_LEARNER.keys()
    assert {(shape.mode, shape.num_ranks) for shape, _ in drawn} == {
        (mode, num_ranks) for mode in ("off", "stream", "ahead") for num_ranks in (1, 2)
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
