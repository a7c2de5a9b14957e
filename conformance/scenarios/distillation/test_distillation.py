"""Capability ``distillation``: whom the policy learns from, and by which loss."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from conformance.doubles.distilled import (
    DIVERGENCE,
    ITSELF,
    MODEL,
    PROMPTED,
    asked,
    jensen_shannon,
    logprobs_of,
    make_trainer,
    samples,
    steps_of,
)
from conformance.doubles.small_run import requested, step_between, weights_of
from rollmatch.model.policy import unwrap

STEADY = "training.lr_scheduler_type=constant"
SGD = ("training.optim=sgd", STEADY, "training.max_grad_norm=0")
RATE = 0.1
WAYS = {
    "padded": ("training.padding_free=false",),
    "concatenated": ("training.padding_free=true",),
    "packed": ("training.packing=true", "training.gradient_accumulation_steps=1", "global_max_length=512"),
}


def is_about_nothing(value):
    return value == pytest.approx(0, abs=1e-6)


def as_saved():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.mark.scenario(
    "distillation/a-teacher-that-is-the-policy-teaches-nothing",
    clauses=["distillation/a-teacher-judges-the-policy-s-own-completions#2,4"],
)
@pytest.mark.parametrize("loss", [(), DIVERGENCE], ids=["sampled", "divergence"])
def test_a_teacher_that_is_the_policy_teaches_nothing(tmp_path, loss):
    trainer = make_trainer(tmp_path, ITSELF, *SGD, f"training.learning_rate={RATE}", *loss)
    before = weights_of(trainer.model)
    trainer.train()
    step = steps_of(trainer)[0]
    assert is_about_nothing(step["teacher_kl"])
    assert is_about_nothing(step["divergence"])
    assert is_about_nothing(step_between(before, weights_of(trainer.model)).abs().max().item())
    assert step["rollout_tokens"] > 16, "the policy has written"


def judged(trainer, policy):
    """Of each rollout of the run's first step: log-probabilities by a policy and by the frozen, prompted teacher."""
    teacher, by_id = as_saved(), {sample.sample_id: sample for sample in samples()}
    for sample_id, rollout in zip(requested(trainer), trainer.report.rollouts, strict=True):
        prompt = asked(trainer.source.template, by_id[sample_id], "{question} {sum}")
        with torch.no_grad():
            theirs = logprobs_of(teacher, prompt, rollout.sampled_ids)
        yield logprobs_of(policy, rollout.prompt_token_ids, rollout.sampled_ids), theirs, rollout.sampled_ids


@pytest.mark.scenario(
    "distillation/a-step-is-the-gradient-of-the-divergence",
    clauses=[
        "distillation/a-teacher-judges-the-policy-s-own-completions#1,2,4,5,8",
        "distillation/the-losses-of-distillation-are-the-published-ones#2,3",
        "distillation/what-a-policy-has-of-its-teacher-is-shown#1",
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_the_gradient_of_the_divergence(tmp_path, way):
    trainer = make_trainer(tmp_path, PROMPTED, *DIVERGENCE, *SGD, f"training.learning_rate={RATE}", *WAYS[way])
    before = weights_of(trainer.model)
    trainer.train()
    policy = as_saved()
    found = [*judged(trainer, policy)]
    loss = torch.cat([jensen_shannon(ours, theirs, beta=0.5, top_k=8) for ours, theirs, _ in found]).mean()
    loss.backward()
    step = steps_of(trainer)[0]
    ids = torch.tensor([token for *_, sampled in found for token in sampled])
    ours, theirs = (torch.cat([one[place] for one in found]).detach() for place in (0, 1))
    own, taught = (rows.gather(-1, ids[:, None]).mean().item() for rows in (ours, theirs))
    agree = (theirs.argmax(-1) == ids).double().mean().item()
    shown = [step[name] for name in ("teacher_logprob", "policy_logprob", "teacher_kl", "teacher_agree")]
    assert shown == pytest.approx([taught, own, own - taught, agree], rel=1e-4)
    assert 0.1 < agree < 0.95
    assert step["divergence"] == pytest.approx(loss.item(), rel=1e-4)
    assert loss > 0.01
    moved = step_between(before, weights_of(trainer.model))
    expected = torch.cat([-RATE * weight.grad.flatten() for _, weight in policy.named_parameters()])
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.scenario(clauses=["distillation/the-losses-of-distillation-are-the-published-ones#1"])
def test_the_sampled_token_s_advantage_is_how_much_likelier_the_teacher_finds_it(tmp_path):
    trainer = make_trainer(tmp_path, PROMPTED, *SGD, f"training.learning_rate={RATE}")
    before = weights_of(trainer.model)
    trainer.train()
    policy, gains, gaps = as_saved(), [], []
    for ours, theirs, ids in judged(trainer, policy):
        chosen = torch.tensor(ids)[:, None]
        own = ours.gather(-1, chosen)
        gaps.append(own.detach() - theirs.gather(-1, chosen))
        gains.append(-gaps[-1] * own)
    (-torch.cat(gains).mean()).backward()
    step = steps_of(trainer)[0]
    assert step["teacher_kl"] == pytest.approx(torch.cat(gaps).mean().item(), rel=1e-4)
    moved = step_between(before, weights_of(trainer.model))
    expected = torch.cat([-RATE * weight.grad.flatten() for _, weight in policy.named_parameters()])
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.scenario(
    "distillation/a-damaged-policy-learns-from-its-better-self",
    clauses=["distillation/a-teacher-judges-the-policy-s-own-completions#2,9"],
)
@pytest.mark.parametrize(
    ("loss", "tuner"),
    [pytest.param((), "lora", marks=pytest.mark.wide), (DIVERGENCE, "full")],
    ids=["sampled-lora", "divergence-full"],
)
def test_a_damaged_policy_learns_from_its_better_self(tmp_path, loss, tuner):
    rate = {"full": 0.0003, "lora": 0.001}[tuner]
    many = ("training.per_device_train_batch_size=16", "custom.extra.grpo.num_generations=4", "training.max_steps=12")
    trainer = make_trainer(
        tmp_path, ITSELF, *loss, *many, f"tuner.train_type={tuner}", f"training.learning_rate={rate}", STEADY
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in unwrap(trainer.model).parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    first = trainer.evaluate()["eval_teacher_logprob"]
    trainer.train()
    assert 0 > trainer.evaluate()["eval_teacher_logprob"] > 2 / 3 * first
    (teacher,) = trainer.learner.objective.teachers
    assert is_about_nothing(step_between(weights_of(as_saved()), weights_of(teacher.answers.model)).abs().max().item())


@pytest.mark.scenario(clauses=["distillation/a-teacher-judges-the-policy-s-own-completions#3"])
def test_the_policy_itself_teaches_with_its_weights_as_they_are(tmp_path):
    """With a rate of 0 the policy stays as saved, and so does what it says as its own teacher."""
    itself = PROMPTED.replace(f"model: {MODEL}", "self: true")
    runs = [
        make_trainer(tmp_path / name, teachers, *DIVERGENCE, "training.learning_rate=0", "training.max_steps=2")
        for name, teachers in (("frozen", PROMPTED), ("self", itself))
    ]
    for trainer in runs:
        trainer.train()
    frozen, own = ([step["divergence"] for step in steps_of(trainer)] for trainer in runs)
    assert own == pytest.approx(frozen, rel=1e-5)
    assert min(own) > 0
    assert runs[1].learner.objective.teachers[0].answers.model is None


@pytest.mark.scenario(clauses=["distillation/a-teacher-judges-the-policy-s-own-completions#6,7"])
def test_a_sample_has_the_first_teacher_of_its_metadata(tmp_path):
    first = samples()[0].metadata["sum"]
    teachers = (
        f'custom.extra.distill.teachers=[{{model: {MODEL}, when: {{sum: {first}}}, prompt: "{{question}} {{sum}}"}},'
        f" {{model: {MODEL}, weight: 0.5}}]"
    )
    trainer = make_trainer(tmp_path, teachers, *DIVERGENCE, "training.per_device_train_batch_size=16")
    trainer.train()
    taught = {
        (segment.sample.metadata["sum"] == first, segment.policy.teacher_weight)
        for batch in trainer.report.batches
        for segment in batch.segments
    }
    assert taught == {(True, 1.0), (False, 0.5)}
