"""GRPO, for real: groups from the digits model's own generate(), a step, windows, resume."""

import dataclasses
import json
from itertools import chain

import pytest
import torch

from conformance.doubles.digits import scenes, unseen
from conformance.doubles.grpo_run import BRIEF, GRPO, ONE_GROUP, SAMPLES, WINDOW
from conformance.doubles.small_run import events, make_trainer, step_between, trained, weights_of
from rollmatch.config import effective

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One step of two prompts, three completions each, and the change it made."""
    return trained(tmp_path_factory.mktemp("plain"), *GRPO, samples=SAMPLES)


@pytest.mark.scenario(clauses=["grpo-server-mode/a-group-of-completions-competes-with-itself#1,2"])
def test_a_step_requests_groups_and_learns_from_each_completion(plain):
    trainer, step = plain
    (requested,) = events(trainer, "requested")
    first, second = requested["sample_ids"][0], requested["sample_ids"][3]
    assert requested["sample_ids"] == [first] * 3 + [second] * 3
    assert len(set(requested["seeds"])) == 6
    assert requested["decoding"]["logprobs"] is True
    (packed,) = events(trainer, "packed")
    assert packed["segments"] == 6
    assert step.isfinite().all()
    assert step.norm() > 0


def segments_of(trainer):
    return [segment for batch in trainer.report.batches for segment in batch.segments]


def test_a_completion_learns_from_its_group_and_its_stop_token_too(plain):
    trainer, _ = plain
    (rewarded,) = events(trainer, "rewarded")
    for start in (0, 3):
        rewards = torch.tensor(rewarded["rewards"][start : start + 3])
        expected = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
        found = [segment.policy.advantages[0] for segment in segments_of(trainer)[start : start + 3]]
        assert found == pytest.approx(expected, abs=1e-5)
    stop_id = trainer.source.template.vocabulary.stop_id
    for segment, rollout in zip(segments_of(trainer), trainer.report.rollouts, strict=True):
        target = segment.token_ids[segment.prompt_len :]
        assert target == rollout.response_token_ids + (stop_id,) * (rollout.finish_reason == "stop")
        assert len(rollout.response_logprobs) == len(target)


def test_the_log_has_rewards_distance_and_drift(plain):
    trainer, _ = plain
    record, (rewarded,) = trainer.state.log_history[0], events(trainer, "rewarded")
    names = ("loss_policy", "kl", "clip_share", "ratio_mean", "drift", "reward_std", "response_len", "truncated_rate")
    assert set(names) <= record.keys()
    assert record["reward"] == pytest.approx(sum(rewarded["rewards"]) / 6)
    assert record["reward"] == pytest.approx(record["reward/digit_sum"] + 0.5 * record["reward/num_digits"])
    assert record["ratio_mean"] == pytest.approx(1)
    assert record["drift"] < 1e-4
    assert rewarded["seconds"].keys() == {"digit_sum", "num_digits"}
    assert rewarded["failures"] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.packing=true", "global_max_length=2048"),
        ("training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=2"),
        (
            *("training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=2"),
            "training.padding_free=true",
        ),
    ],
    ids=["packed", "accumulated", "padding-free"],
)
def test_packing_and_accumulation_change_nothing_but_rounding(overrides, plain, tmp_path):
    trainer, step = trained(tmp_path, *GRPO, *overrides, samples=SAMPLES)
    reference, expected = plain
    assert [r.response_token_ids for r in trainer.report.rollouts] == [
        r.response_token_ids for r in reference.report.rollouts
    ]
    assert (step - expected).norm() < TOLERANCE * expected.norm()


def test_an_answer_that_cannot_be_judged_is_left_out(tmp_path):
    rewards = "custom.extra.grpo.rewards=[{function: conformance.doubles.rewards:fails_on_odd_samples}]"
    samples = [sample for sample in SAMPLES if sample.sample_id in (0, 1)]
    trainer, step = trained(tmp_path, *GRPO, rewards, samples=samples)
    segments = segments_of(trainer)
    assert {segment.policy.is_masked for segment in segments if segment.sample.sample_id == 1} == {True}
    assert {segment.policy.is_masked for segment in segments if segment.sample.sample_id == 0} == {False}
    assert trainer.state.log_history[0]["reward_failed_rate"] == 0.5
    (rewarded,) = events(trainer, "rewarded")
    assert len(rewarded["failures"]) == 3
    assert "LookupError: an odd sample" in rewarded["failures"][0]
    assert step.norm() > 0


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Six steps: a window of four (two steps, gone through twice) and the beginning of the next."""
    folder = tmp_path_factory.mktemp("windowed")
    overrides = (*GRPO, *WINDOW, "training.max_steps=6", "training.save_steps=3", "training.learning_rate=1")
    trainer, _ = trained(folder, *overrides, samples=unseen(SAMPLES), is_shallow=True)
    return trainer, overrides, folder


def test_a_window_is_rolled_out_once_and_learnt_from_several_times(windowed):
    trainer, *_ = windowed
    assert [event["step"] for event in events(trainer, "requested")] == [0, 4]
    assert [event["step"] for event in events(trainer, "synced")] == [0, 4]
    first, second = events(trainer, "requested")
    assert len(first["seeds"]) == len(second["seeds"]) == 6
    learnt = [sorted({*chain(*event["sample_ids"])}) for event in events(trainer, "packed")]
    assert learnt[0] == learnt[2] != learnt[1] == learnt[3]
    assert sorted({*learnt[0], *learnt[1]}) == sorted({*first["sample_ids"]})


def test_later_passes_are_measured_against_where_the_window_began(windowed):
    trainer, *_ = windowed
    ratios = [line["ratio_mean"] for line in trainer.state.log_history if "loss" in line]
    assert ratios[0] == pytest.approx(1, abs=1e-5)
    assert abs(ratios[2] - 1) > 1e-4
    assert ratios[4] == pytest.approx(1, abs=1e-5)


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


@pytest.mark.scenario(clauses=["grpo-server-mode/the-options-of-the-policy-gradient-enter-the-loss#7"])
@pytest.mark.parametrize(
    ("overrides", "temperature"), [((), 0.0), ((BRIEF, "custom.extra.grpo.eval_temperature=0.7"), 0.7)]
)
def test_an_evaluation_rewards_answers_at_its_own_temperature_and_writes_some_down(tmp_path, overrides, temperature):
    trainer = make_trainer(tmp_path, *GRPO, *overrides)
    metrics = trainer.evaluate()
    (requested,) = events(trainer, "requested")
    decoding = requested["decoding"]
    assert (requested["purpose"], decoding["temperature"], decoding["logprobs"]) == ("eval", temperature, False)
    assert requested["num_requests"] == 4
    (event,) = events(trainer, "evaluated")
    record = json.loads((tmp_path / event["file"]).read_text())
    assert [answer["sample_id"] for answer in record["answers"]] == [sample.sample_id for sample in scenes()[:4]]
    assert metrics["eval_reward"] == pytest.approx(sum(answer["reward"] for answer in record["answers"]) / 4)


DORA = ("tuner.train_type=lora", "tuner.use_dora=true")


DISTANT = (*GRPO, *ONE_GROUP, "custom.extra.grpo.beta=0.1", "training.max_steps=2")


def kls_of(trainer):
    """After the first step, which starts at the reference."""
    first, *others = [line["kl"] for line in trainer.state.log_history if "loss" in line]
    assert first == pytest.approx(0, abs=1e-6)
    assert min(others) > 1e-6
    return others


def test_the_reference_is_a_copy_of_the_policy_before_training(tmp_path):
    trainer, _ = trained(tmp_path, *DISTANT, samples=SAMPLES)
    kls_of(trainer)
    before = weights_of(make_trainer(tmp_path / "fresh", *GRPO).model)
    assert not step_between(before, weights_of(trainer.learner.reference)).any()


def passes_of(trainer):
    """(tokens, whether it is learnt from) of each forward pass but those of generate; filled while it trains."""
    passes = []

    def note(_, args, inputs):
        if inputs.get("use_cache") is False:
            passes.append((inputs["input_ids"].numel(), torch.is_grad_enabled()))

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    return passes


@pytest.mark.parametrize("packing", ["false", "true"])
def test_a_micro_batch_takes_one_pass_and_one_more_for_a_reference_without_adapters(tmp_path, monkeypatch, packing):
    """None for old log-probabilities; the distance is the one to log-probabilities that are scored before."""
    settings = (*DISTANT, *DORA, f"training.packing={packing}", "training.gradient_accumulation_steps=2")
    options = {"samples": unseen(SAMPLES), "is_shallow": True}
    trainer = make_trainer(tmp_path / "in-batch", *settings, **options)
    assert trainer.learner.reference is None
    passes = passes_of(trainer)
    trainer.train()
    assert [learns for _, learns in passes] == [False, True] * 4
    assert [size for size, _ in passes[::2]] == [size for size, _ in passes[1::2]]
    monkeypatch.setattr(effective, "reference_in_batch", lambda config: False)
    before, _ = trained(tmp_path / "before", *settings, **options)
    assert kls_of(trainer) == pytest.approx(kls_of(before), rel=1e-3)


def test_a_completion_that_waits_for_a_row_keeps_log_probabilities_of_the_weights_that_made_it(tmp_path):
    """Only those that wait are scored, once; the others start from the step's own."""
    packed = ("training.packing=true", "global_max_length=80", "training.max_steps=2")
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


def test_log_probabilities_from_the_engine_may_start_the_ratio(tmp_path):
    trainer, _ = trained(tmp_path, *GRPO, BRIEF, "custom.extra.grpo.old_logprobs=server", samples=SAMPLES)
    segments = segments_of(trainer)
    sampled = [rollout.response_logprobs for rollout in trainer.report.rollouts]
    assert [segment.policy.old_logprobs for segment in segments] == sampled
    assert {segment.policy.sampler_logprobs for segment in segments} == {None}
    assert trainer.state.log_history[0]["ratio_mean"] == pytest.approx(1, abs=1e-4)


def test_samples_with_a_question_of_their_own_show_that(tmp_path):
    samples = [dataclasses.replace(sample, objects=()) for sample in unseen(SAMPLES)]
    rewards = "custom.extra.grpo.rewards=[{function: conformance.doubles.rewards:digit_sum}]"
    trainer, step = trained(tmp_path, *GRPO, BRIEF, rewards, samples=samples)
    prompt = trainer.source.template.vocabulary.text(trainer.report.rollouts[0].prompt_token_ids)
    assert "What is " in prompt
    assert "List every digit" not in prompt
    assert step.norm() > 0
