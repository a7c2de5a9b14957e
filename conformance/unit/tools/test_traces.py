"""Journals of runs on real GPUs, judged again: the same checker as for simulated and CPU runs.

They come from ``ROLLMATCH_TRACES=DIRECTORY pytest conformance -m gpu``, unchanged.
"""

import json
from pathlib import Path

import pytest

from conformance.tools.judge import judge

TRACES = sorted(Path(__file__).parents[3].joinpath("fixtures/traces").glob("*.jsonl"))


@pytest.fixture(params=TRACES, ids=lambda path: path.stem)
def events(request):
    return [json.loads(line) for line in request.param.read_text().splitlines()]


def rules_of(events):
    return {breach.rule for breach in judge(events)}


def test_there_are_traces():
    assert TRACES


def test_a_run_on_gpus_kept_its_fence(events):
    assert "NVIDIA" in events[0]["device"]
    assert sum(event["event"] == "step" for event in events) >= 20
    assert sum(event["event"] == "generated" for event in events) >= 20
    assert judge(events) == []


def test_the_same_run_without_one_sync_did_not(events):
    dropped = [place for place, event in enumerate(events) if event["event"] == "synced"][5]
    assert rules_of(events[:dropped] + events[dropped + 1 :]) >= {"sync-before-request", "newest-weights", "version"}


def test_the_same_run_with_rollouts_by_older_weights_did_not(events):
    place = [place for place, event in enumerate(events) if event["event"] == "generated"][7]
    older = events[place] | {"policy_version": events[place]["policy_version"] - 1}
    assert rules_of([*events[:place], older, *events[place + 1 :]]) == {"newest-weights"}
