"""Recorded runs of trainers, judged again: the verdicts are those that they had."""

import json

import pytest

from conformance.judge.trainers.checks import CHECKS
from conformance.judge.trainers.known import KNOWN
from conformance.judge.trainers.recording import TRAINERS, recorded_trainers
from conformance.judge.trainers.runs import RUNS

RECORDED = {each.trainer: each for each in recorded_trainers()}


@pytest.mark.parametrize("trainer", RECORDED)
def test_what_a_trainer_did_is_judged_as_it_was(trainer):
    rows = RECORDED[trainer].rows()
    recorded = json.loads((TRAINERS / f"{trainer}.json").read_text())["verdicts"]
    assert {row.check.check_id: f"{row.state} {row.reason}".strip() for row in rows} == recorded
    assert recorded.keys() == {check.check_id for check in CHECKS}
    assert RECORDED[trainer].runs.keys() == {*RUNS}


@pytest.mark.parametrize("trainer", RECORDED)
def test_a_recording_names_no_place_of_the_machine_it_was_made_on(trainer):
    assert not [
        word for word in ("/work/", "/home/", "/root/", "/tmp/") if word in (TRAINERS / f"{trainer}.json").read_text()
    ]


def test_trainers_of_others_and_ours_are_recorded():
    assert {known.trainer for known in KNOWN} == RECORDED.keys()
