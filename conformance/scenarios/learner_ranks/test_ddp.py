"""Two learner ranks on gloo, whole or split by FSDP2: they learn what one rank learns, and stop together."""

import json
import signal
import sys
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file

from conformance.doubles.ddp_worker import OF_ALL_RANKS
from conformance.doubles.digits import write_cut
from conformance.doubles.small_run import events, make_trainer, step_between, weights_of
from conformance.doubles.started import HF, finish_ranks, in_time, journal_of, journals_of, started_ranks, train_command
from conformance.oracle.policy import saved
from rollmatch.run.directory import last_checkpoint

WORKER = ("-m", "conformance.doubles.ddp_worker")
TWO_STEPS = (
    *("training.packing=true", "training.max_steps=2", "training.learning_rate=0.1"),
    "custom.extra.rollout_matching.max_new_tokens=16",
)
TOLERANCE = 1e-4
"""Of the length of both steps: float32, sums in another order, a second forward pass on the first's weights."""


@pytest.fixture(scope="module")
def pair_of_ranks(tmp_path_factory):
    """Two ranks of two samples each, split by FSDP2; test_tokens_per_micro_batch.py and draws try DDP."""
    folder = tmp_path_factory.mktemp("two_ranks")
    overrides = (*TWO_STEPS, "training.per_device_train_batch_size=2", "training.strategy=fsdp2")
    finish_ranks(folder, 2, sys.executable, *WORKER, "digits", str(folder), *overrides)
    return folder


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The same four samples a step, the weights before and after, and the first evaluation."""
    trainer = make_trainer(tmp_path_factory.mktemp("one_rank"), *TWO_STEPS)
    metrics, before = trainer.evaluate(), weights_of(trainer.model)
    trainer.train()
    return trainer, before, metrics


def log_of(folder, rank):
    return json.loads((folder / f"rank{rank}.json").read_text())


def test_both_ranks_hold_the_same_weights_bit_for_bit(pair_of_ranks):
    first, second = (load_file(pair_of_ranks / f"rank{rank}.safetensors") for rank in (0, 1))
    assert first.keys() == second.keys()
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.scenario(
    "learner-ranks/one-rank-s-batch-has-no-image",
    "learner-ranks/no-rank-s-batch-has-an-image",
    clauses=[
        "learner-ranks/the-policy-is-shared-as-configured-or-not-at-all#6",
        "learner-ranks/the-policy-is-shared-as-configured-or-not-at-all#7",
    ],
)
@pytest.mark.parametrize("frozen", ["true", "false"])
def test_a_rank_whose_batch_has_no_image_learns_with_the_others(tmp_path, frozen):
    """DDP waits for all gradients, and FSDP2 sums up those that are there: the vision tower's are not."""
    overrides = (*TWO_STEPS, "training.max_steps=4", "training.per_device_train_batch_size=1", "training.seed=6")
    overrides += (f"tuner.freeze_llm={frozen}", f"training.gradient_checkpointing={frozen == 'false'}")
    overrides += ("training.weight_decay=0.1", "training.save_steps=1", "training.save_total_limit=4")
    learnt = {}
    for strategy in ("ddp", "fsdp2"):
        (out := tmp_path / strategy).mkdir()
        words = ("mixed", str(out), *overrides, f"training.strategy={strategy}")
        finish_ranks(out, 2, sys.executable, *WORKER, *words)
        steps = zip(*journals_of(out, "packed", num_ranks=2), strict=True)
        kinds = [{sample_id % 2 for row in ranks for sample_id in chain(*row["sample_ids"])} for ranks in steps]
        assert kinds[0] == {0, 1}, "no step had an image on one rank alone"
        assert kinds[1] == {1}, "no step had no image"
        towers = [
            {
                name: weight
                for name, weight in saved(out / f"checkpoint-{step}", adapts=False).items()
                if "visual" in name
            }
            for step in (1, 2)
        ]
        assert all(torch.equal(weight, towers[1][name]) for name, weight in towers[0].items())
        first, learnt[strategy] = (load_file(out / f"rank{rank}.safetensors") for rank in (0, 1))
        assert all(torch.equal(weight, learnt[strategy][name]) for name, weight in first.items())
    whole, split = learnt["ddp"], learnt["fsdp2"]
    assert all((split[name] - weight).norm() <= TOLERANCE * weight.norm() for name, weight in whole.items())


def test_each_rank_rolls_out_and_learns_its_own_half(pair_of_ranks, one_rank):
    trainer, *_ = one_rank
    expected = [event["sample_ids"] for event in events(trainer, "requested") if event["purpose"] == "train"]
    for event_name in ("requested", "packed"):
        halves = [
            [
                list(chain(*event["sample_ids"])) if event_name == "packed" else event["sample_ids"]
                for event in part
                if event.get("purpose") != "eval"
            ]
            for part in journals_of(pair_of_ranks, event_name, num_ranks=2)
        ]
        assert [sorted(first + second) for first, second in zip(*halves, strict=True)] == list(map(sorted, expected))
        assert all(len(half) == 2 for half in chain(*halves))
    seeds = [
        event["seeds"]
        for event in in_time(journals_of(pair_of_ranks, "requested", num_ranks=2))
        if event["purpose"] == "train"
    ]
    assert len({*chain(*seeds)}) == 8


@pytest.mark.scenario(clauses=["supervision/the-loss-does-not-depend-on-how-a-step-is-cut-up#1,2"])
def test_two_ranks_learn_what_one_rank_learns(pair_of_ranks, one_rank):
    trainer, before, _ = one_rank
    expected = step_between(before, weights_of(trainer.model))
    step = step_between(before, load_file(pair_of_ranks / "rank0.safetensors"))
    assert (step - expected).norm() < TOLERANCE * expected.norm()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    for rank in (0, 1):
        assert log_of(pair_of_ranks, rank)["losses"] == pytest.approx(losses, rel=1e-4)


@pytest.mark.scenario(clauses=["observability/quality-is-measured-by-counts#7"])
def test_figures_of_a_step_are_those_of_all_ranks(pair_of_ranks, one_rank):
    """Each rank learns from its own segments; what the page shows is of the whole step."""
    trainer, *_ = one_rank
    lines = [line for line in trainer.state.log_history if "loss" in line]
    expected = [[line[name] for name in OF_ALL_RANKS] for line in lines]
    for rank in (0, 1):
        assert log_of(pair_of_ranks, rank)["parts"] == [pytest.approx(pair, rel=1e-3) for pair in expected]


def test_an_evaluation_over_two_ranks_counts_every_scene_once(pair_of_ranks, one_rank):
    _, _, expected = one_rank
    for rank in (0, 1):
        metrics = log_of(pair_of_ranks, rank)["metrics"]
        timed = {name for name in metrics if name.endswith(("seconds", "tokens_per_s"))}
        assert {name: metrics[name] for name in metrics.keys() - timed} == {
            name: expected[name] for name in expected.keys() - timed
        }


def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(tmp_path):
    """Through the command line."""
    out = tmp_path / "run"
    overrides = (*HF, f"training.output_dir={out}", "training.max_steps=500", "training.per_device_train_batch_size=2")
    narrow = ("global_max_length=330", "training.eval_scenes=2", "custom.extra.rollout_matching.max_new_tokens=8")
    small = f"model.model={write_cut(tmp_path / 'model')}"
    command = train_command(*overrides, *narrow, small)
    with started_ranks(tmp_path, 2, *command) as ranks:
        ranks[0].wait_until(lambda: len(journal_of(out, "step")) >= 2)
        ranks[1].process.send_signal(signal.SIGINT)
        for rank in ranks:
            rank.wait()
    stops = journals_of(out, "interrupted", num_ranks=2)
    assert [(len(events_), events_[0]["signal"]) for events_ in stops] == [(1, signal.SIGINT)] * 2, ranks[0].output()
    step = stops[0][0]["step"]
    assert stops[1][0]["step"] == step >= 2
    checkpoint = last_checkpoint(out)
    assert checkpoint == out / f"checkpoint-{step}"
    assert sorted(path.name for path in checkpoint.glob("packer-rank*")) == ["packer-rank0.json", "packer-rank1.json"]
    assert [event["learner_world_size"] for event in journal_of(out, "run")] == [2]
    assert "with a checkpoint; continue with the same command and --resume" in ranks[0].output()
