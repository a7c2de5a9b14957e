"""Episodes of several turns in training, for real: resumed in mid-window, and on two learner ranks."""

import json
import sys
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file

from conformance.doubles.small_run import events, step_between, weights_of
from conformance.doubles.started import finish_ranks, journals_of
from conformance.doubles.turns import make_trainer

WORKER = ("-m", "conformance.doubles.ddp_worker")
JUDGED = {"vineppo": "valued", "vineppo_mcts": "valued", "grpo": "rewarded"}


@pytest.mark.scenario(
    "environments/a-checkpoint-inside-a-window", clauses=["environments/episodes-can-be-played-again#6"]
)
@pytest.mark.parametrize("variant", JUDGED)
def test_a_run_that_goes_on_in_mid_window_learns_what_it_would_have_learnt(variant, tmp_path):
    overrides = (f"custom.trainer_variant={variant}", "custom.extra.vineppo.search.num_rounds=2")
    whole = make_trainer(tmp_path / "whole", *overrides)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", *overrides)
    checkpoint = tmp_path / "whole/checkpoint-3"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert [event["step"] for event in events(whole, "played")] == [0, 4]
    assert [event["step"] for event in events(resumed, "played")] == [4]
    for name in ("requested", "played", JUDGED[variant]):
        ours, theirs = ({**events(one, name)[-1], "time": 0, "seconds": 0} for one in (resumed, whole))
        for event, version in ((ours, 1), (theirs, 2)):  # versions restart with the process
            runs = event.pop("policy_versions", [])
            assert {written for one in runs for written, _ in one} <= {version}
            event["written"] = [num for one in runs for _, num in one]
        assert ours == theirs
    learnt = [event["sample_ids"] for event in events(resumed, "packed")]
    assert learnt == [event["sample_ids"] for event in events(whole, "packed")][3:]
    assert min(line["grad_norm"] for line in whole.state.log_history if "loss" in line) > 0
    assert not step_between(weights_of(whole.model), weights_of(resumed.model)).any()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Two ranks of one sample a step each."""
    folder = tmp_path_factory.mktemp("two_ranks")
    words = ("turns", str(folder), "training.per_device_train_batch_size=1")
    finish_ranks(folder, 2, sys.executable, *WORKER, *words)
    return folder


def test_both_ranks_hold_the_same_weights_bit_for_bit(two_ranks):
    first, second = (load_file(two_ranks / f"rank{rank}.safetensors") for rank in (0, 1))
    assert first.keys() == second.keys()
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.scenario(
    "server-connection/a-server-is-restarted-while-one-of-two-learner-ranks-plays-episodes",
    clauses=["server-connection/a-call-outlives-a-busy-server#5"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_restart_between_turns_of_one_rank_changes_nothing_that_is_learnt(two_ranks, rank):
    held, restarted = (load_file(two_ranks / name / f"rank{rank}.safetensors") for name in ("calm", "restarted"))
    assert all(torch.equal(weight, restarted[name]) for name, weight in held.items())
    events = journals_of(two_ranks / "restarted", num_ranks=2)[rank]
    assert [(event["step"], event["version"]) for event in events if event["event"] == "synced"] == [
        (0, 1), (0, 2), (0, 3), (4, 4)
    ]  # fmt: skip
    assert len([event for event in events if event["event"] == "restarted"]) == 2


def test_each_rank_plays_and_learns_its_own_half(two_ranks, tmp_path):
    alone = make_trainer(tmp_path)
    alone.train()
    halves = [[event for event in part if event["step"] < 4] for part in journals_of(two_ranks, "valued", num_ranks=2)]
    assert [len(half) for half in halves] == [1, 1]
    mine, theirs = (half[0]["sample_ids"] for half in halves)
    assert len(mine) == len(theirs) == 10
    assert sorted(mine + theirs) == sorted(events(alone, "valued")[0]["sample_ids"])
    requested = chain(*journals_of(two_ranks, "requested", num_ranks=2))
    seeds = [seed for event in requested if event["purpose"] == "train" for seed in event["seeds"]]
    assert len(set(seeds)) == len(seeds)


def test_an_evaluation_over_two_ranks_plays_every_sample_once(two_ranks, tmp_path):
    alone = make_trainer(tmp_path)
    expected = alone.evaluate()
    for rank in (0, 1):
        metrics = json.loads((two_ranks / f"rank{rank}.json").read_text())["metrics"]
        assert (metrics["eval_reward"], metrics["eval_num_scenes"]) == (pytest.approx(expected["eval_reward"]), 6)
    played = [
        event for part in journals_of(two_ranks, "played", num_ranks=2) for event in part if event["num_episodes"] == 3
    ]
    assert len(played) == 2
    (whole,) = events(alone, "played")
    for name in ("num_turns", "num_tokens", "finished"):
        assert sum(event[name] for event in played) == whole[name]
