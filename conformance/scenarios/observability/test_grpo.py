"""GRPO, for real: groups from the digits model's own generate(), a step, windows, resume."""

import pytest
import torch

from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.digits import load_model, unseen
from conformance.doubles.grpo_run import GRPO, ONE_GROUP, SAMPLES, WINDOW
from conformance.doubles.small_run import events, make_trainer, step_between, trained, weights_of
from rollmatch.config.training import TunerConfig


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One step of two prompts, three completions each, and the change it made."""
    return trained(tmp_path_factory.mktemp("plain"), *GRPO, samples=SAMPLES)


def segments_of(trainer):
    return [segment for batch in trainer.report.batches for segment in batch.segments]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Six steps: a window of four (two steps, gone through twice) and the beginning of the next."""
    folder = tmp_path_factory.mktemp("windowed")
    overrides = (*GRPO, *WINDOW, "training.max_steps=6", "training.save_steps=3", "training.learning_rate=1")
    trainer, _ = trained(folder, *overrides, samples=unseen(SAMPLES), is_shallow=True)
    return trainer, overrides, folder


@pytest.mark.scenario("observability/a-segment-from-before-a-resume-has-version-0")
def test_a_run_that_continues_in_mid_window_learns_what_it_would_have_learnt(windowed, tmp_path):
    trainer, overrides, folder = windowed
    resumed = make_trainer(tmp_path, *overrides, samples=unseen(SAMPLES), is_shallow=True)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert [event["step"] for event in events(resumed, "requested")] == [4]
    assert events(resumed, "requested")[0]["seeds"] == events(trainer, "requested")[1]["seeds"]
    difference = step_between(weights_of(trainer.model), weights_of(resumed.model))
    assert not difference.any()
    assert [event["version"] for event in events(resumed, "synced")] == [1]
    oldest = {event["step"]: event["oldest_policy_version"] for event in events(resumed, "packed")}
    assert oldest == {3: 0, 4: 1, 5: 1}
    rewards = [
        [line["reward"] for line in each.state.log_history if "loss" in line and line["step"] > 3]
        for each in (trainer, resumed)
    ]
    assert rewards[0] == rewards[1]
    assert len(rewards[0]) == 3


DORA = ("tuner.train_type=lora", "tuner.use_dora=true")


DISTANT = (*GRPO, *ONE_GROUP, "custom.extra.grpo.beta=0.1", "training.max_steps=2")


def kls_of(trainer):
    """After the first step, which starts at the reference."""
    first, *others = [line["kl"] for line in trainer.state.log_history if "loss" in line]
    assert first == pytest.approx(0, abs=1e-6)
    assert min(others) > 1e-6
    return others


def passes_of(trainer):
    """(tokens, whether it is learnt from) of each forward pass but those of generate; filled while it trains."""
    passes = []

    def note(_, args, inputs):
        if inputs.get("use_cache") is False:
            passes.append((inputs["input_ids"].numel(), torch.is_grad_enabled()))

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    return passes


@pytest.mark.parametrize("packing", ["false", "true"])
def test_a_micro_batch_takes_one_pass_and_one_more_for_a_reference_without_adapters(tmp_path, packing):
    """None for old log-probabilities. That the distance is right is drawn against the oracle."""
    settings = (*DISTANT, *DORA, f"training.packing={packing}", "training.gradient_accumulation_steps=2")
    options = {"samples": unseen(SAMPLES), "is_shallow": True}
    trainer = make_trainer(tmp_path / "in-batch", *settings, **options)
    assert trainer.learner.reference is None
    passes = passes_of(trainer)
    trainer.train()
    assert [learns for _, learns in passes] == [False, True] * 4
    assert [size for size, _ in passes[::2]] == [size for size, _ in passes[1::2]]


def test_the_reference_of_a_continued_adapter_is_the_policy_at_the_start(tmp_path):
    """The model without the adapter is another policy: the adapter was trained before."""
    adapted = perturb_adapters(load_model(TunerConfig(train_type="lora")))
    adapted.save_pretrained(tmp_path / "adapter")
    continued = ("tuner.train_type=lora", f"model.adapter={tmp_path / 'adapter'}", "model.adapter_start=continue")
    trainer = make_trainer(tmp_path / "run", *DISTANT, *continued, samples=unseen(SAMPLES))
    trainer.train()
    assert kls_of(trainer)


def test_a_completion_that_waits_for_a_row_keeps_log_probabilities_of_the_weights_that_made_it(tmp_path):
    """Only those that wait are scored, once; the others start from the step's own."""
    packed = (
        *("training.packing=true", "training.packing_drop_last=true"),
        "global_max_length=80",
        "training.max_steps=2",
    )
    trainer = make_trainer(tmp_path, *GRPO, *ONE_GROUP, *packed, samples=unseen(SAMPLES), is_shallow=True)
    passes = passes_of(trainer)
    trainer.train()
    old = [segment.policy.old_logprobs for segment in segments_of(trainer)]
    assert [learns for _, learns in passes] == [False, True, False, True]
    assert passes[0][0] < passes[1][0], "one of three waits"
    assert old[0] is not None
    assert set(old[1:]) == {None}
    assert trainer.state.log_history[1]["ratio_mean"] != pytest.approx(1, abs=1e-6)
    assert trainer.state.log_history[0]["ratio_mean"] == pytest.approx(1, abs=1e-6)
