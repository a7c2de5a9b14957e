"""Passes that follow from the tokens of a step, for real: what is learnt is that of a fixed number of micro-batches."""

import json
import sys
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file

from conformance.doubles import turns
from conformance.doubles.grpo_run import GRPO, SAMPLES, WINDOW
from conformance.doubles.small_run import events, make_trainer, step_between, trained, weights_of
from conformance.doubles.started import finish_ranks, journals_of

TOLERANCE = 1e-4
"""Of a step's length: float32, sums in another order. A wrong divisor differs by a third or more."""


def rows_of(num_tokens):
    """Settings."""
    return (
        f"training.tokens_per_micro_batch={num_tokens}",
        f"global_max_length={num_tokens}",
        "training.packing=false",
    )


ROWS = 160
"""Tokens of a row: two completions."""
SHORT_ROWS = rows_of(ROWS)
LONG_ROWS = rows_of(240)
"""One or two responses of rollout matching."""
WORKER = ("-m", "conformance.doubles.ddp_worker")


def assert_same_step(found, expected):
    (trainer, step), (reference, whole) = found, expected
    assert whole.norm() > 0
    assert (step - whole).norm() < TOLERANCE * whole.norm()
    ours, theirs = (one.state.log_history[0]["loss"] for one in (trainer, reference))
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def assert_no_padding(trainer, limit):
    sizes = [batch.inputs["input_ids"].numel() for batch in trainer.report.batches]
    assert sizes == [batch.num_tokens - batch.num_shared for batch in trainer.report.batches]
    assert max(sizes) <= limit
    assert len(sizes) > 1


@pytest.mark.scenario(clauses=["packing/the-number-of-passes-may-follow-from-the-tokens#1,4"])
def test_a_step_is_that_of_one_padded_batch(tmp_path):
    """Of sequences that count alike; draws try the other objectives and divisors."""
    settings = (*GRPO, "custom.extra.grpo.normalize=sequence")
    expected = trained(tmp_path / "fixed", *settings, samples=SAMPLES)
    found = trained(tmp_path / "tokens", *settings, *SHORT_ROWS, samples=SAMPLES)
    assert_no_padding(found[0], ROWS)
    assert sum(len(batch.segments) for batch in found[0].report.batches) == 6
    assert_same_step(found, expected)


def test_episodes_learn_the_same_in_windows_and_resume_exactly(tmp_path):
    """Old log-probabilities of the window, too, come from packed rows."""
    settings = ("custom.trainer_variant=vineppo_mcts", "custom.extra.vineppo.search.num_rounds=2")
    fixed = turns.make_trainer(tmp_path / "fixed", *settings)
    length = fixed.learner.lengths.max_len
    rows = (f"training.tokens_per_micro_batch={length}", "training.gradient_accumulation_steps=1")
    whole = turns.make_trainer(tmp_path / "whole", *settings, *rows)
    before = weights_of(fixed.model)
    for trainer in (fixed, whole):
        trainer.train()
    expected, found = (step_between(before, weights_of(trainer.model)) for trainer in (fixed, whole))
    assert (found - expected).norm() < TOLERANCE * expected.norm()
    resumed = turns.make_trainer(tmp_path / "resumed", *settings, *rows)
    checkpoint = tmp_path / "whole/checkpoint-3"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    learnt = [event["sample_ids"] for event in events(resumed, "packed")]
    assert learnt == [event["sample_ids"] for event in events(whole, "packed")][3:]
    assert not step_between(weights_of(whole.model), weights_of(resumed.model)).any()


def test_passes_without_gradients_keep_the_limit(tmp_path):
    """Recomputed old log-probabilities of a window, and those of a reference."""
    settings = (*GRPO, *WINDOW, *SHORT_ROWS, "custom.extra.grpo.beta=0.1", "training.max_steps=2")
    trainer, sizes = make_trainer(tmp_path, *settings, samples=SAMPLES, is_shallow=True), []

    def note(_, args, inputs):
        if inputs.get("use_cache") is False:
            sizes.append(inputs["input_ids"].shape)

    for model in (trainer.model, trainer.learner.reference):
        model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train()
    assert {rows for rows, _ in sizes} == {1}
    assert max(tokens for _, tokens in sizes) <= ROWS


TWO_STEPS = ("training.max_steps=2", "training.learning_rate=0.1", "custom.extra.rollout_matching.max_new_tokens=32")


PAIRS = ["ddp", pytest.param("fsdp2", marks=pytest.mark.wide)]


@pytest.fixture(scope="module", params=PAIRS)
def pair_of_ranks(request, tmp_path_factory):
    """Two ranks of two samples each, whose rows differ in number."""
    folder = tmp_path_factory.mktemp("two_ranks")
    overrides = (*TWO_STEPS, "training.per_device_train_batch_size=2", f"training.strategy={request.param}")
    words = (*overrides, *LONG_ROWS, "training.save_steps=1")
    finish_ranks(folder, 2, sys.executable, *WORKER, "uneven", str(folder), *words)
    return folder, words


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The same four samples a step in one padded batch, and the weights before and after."""
    trainer = make_trainer(tmp_path_factory.mktemp("one_rank"), *TWO_STEPS, "training.packing=false")
    before = weights_of(trainer.model)
    trainer.train()
    return trainer, before


def requests(folder):
    return journals_of(folder, "requested", num_ranks=2)


def losses_of(folder, rank):
    return json.loads((folder / f"rank{rank}.json").read_text())["losses"]


@pytest.mark.scenario(clauses=["packing/the-number-of-passes-may-follow-from-the-tokens#2,3,4"])
def test_two_ranks_run_as_many_passes_and_learn_what_one_rank_learns(pair_of_ranks, one_rank):
    (folder, _), (trainer, before) = pair_of_ranks, one_rank
    packed = list(zip(*journals_of(folder, "packed", num_ranks=2), strict=True))
    learnt = [[[*map(len, event["sample_ids"])] for event in ranks] for ranks in packed]
    assert learnt == [[[1, 1, 1], [1, 0, 0]]] * 2
    moved = [set(chain(*event["sample_ids"])) for event in packed[0]]
    asked = [next(set(e["sample_ids"]) for e in rank if e["purpose"] == "train") for rank in requests(folder)]
    assert moved != asked, "no segment was exchanged"
    expected = [sorted(chain(*event["sample_ids"])) for event in events(trainer, "packed")]
    assert [sorted(chain(*(row for event in ranks for row in event["sample_ids"]))) for ranks in packed] == expected
    step, whole = (
        step_between(before, weights)
        for weights in (load_file(folder / "rank0.safetensors"), weights_of(trainer.model))
    )
    assert (step - whole).norm() < TOLERANCE * whole.norm()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    for rank in (0, 1):
        assert losses_of(folder, rank) == pytest.approx(losses, rel=1e-4)
    first, second = (load_file(folder / f"rank{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.slow
@pytest.mark.parametrize("pair_of_ranks", PAIRS[:1], indirect=True)
def test_ranks_that_resume_learn_what_they_would_have_learnt(pair_of_ranks, tmp_path):
    folder, words = pair_of_ranks
    checkpoint = str(folder / "checkpoint-1")
    finish_ranks(tmp_path, 2, sys.executable, *WORKER, "uneven", str(tmp_path), *words, CHECKPOINT=checkpoint)
    whole, resumed = (load_file(one / "rank0.safetensors") for one in (folder, tmp_path))
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
