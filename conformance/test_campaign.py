"""A short fault campaign: twenty faults of every phase cost a run no sample and no hang, and end it by names only."""

from conformance import campaign
from conformance.campaign import OF_LEARNER, OF_SERVER, STEPS, draw, judged


def test_twenty_faults_lose_nothing():
    shown = []
    num_faults, num_found, ends = campaign.campaign(20, num_trials=26, show=shown.append)
    assert num_found == 0, "\n".join(shown)
    assert num_faults >= 20
    assert ends["finished"] == 26


def test_every_phase_is_drawn_and_a_seed_repeats_itself():
    drawn = [draw(number, 1) for number in range(100)]
    assert {fault.phase for _, faults in drawn for fault in faults} == OF_SERVER.keys() | OF_LEARNER.keys()
    assert drawn == [draw(number, 1) for number in range(100)]


def test_the_campaign_finds_what_is_wrong():
    learned = {"event": "learned", "step": 0, "sample_ids": [0], "read": [[0, 100]]}
    assert [problem.split()[0] for problem in judged([learned], ["hang"])] == ["hang", "not", "step"]
    lost = [learned | {"step": step, "read": [[step + 1, 100]]} for step in range(STEPS)]  # the same one each time
    assert [problem.split()[0] for problem in judged(lost, ["finished"])] == ["samples"]
