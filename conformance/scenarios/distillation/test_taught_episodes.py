"""Distillation of episodes of several turns: what a teacher says of them, and of what the policy wrote of them."""

from itertools import compress, count

import pytest
import torch
from transformers import AutoModelForCausalLM

from conformance.doubles.configs import config_with, problems_of
from conformance.doubles.digits import ROOT
from conformance.doubles.distilled import DIVERGENCE, jensen_shannon, logprobs_of, steps_of
from conformance.doubles.overlapped import attach_servers
from conformance.doubles.small_run import weights_of
from conformance.doubles.teacher_server import TeacherDouble, serving
from conformance.doubles.turns import make_trainer
from fixtures.tasks.treasures import TwoTreasures
from rollmatch.config import load_config
from rollmatch.data import BadSamples
from rollmatch.run.assemble import make_template
from rollmatch.run.preflight import load_checked
from rollmatch.run.teachers import check_teachers

MODEL = ROOT / "fixtures/models/grid"
DISTILL = (
    *("custom.trainer_variant=distill", "custom.extra.grpo.num_generations=3", "training.max_steps=2"),
    *("custom.extra.grpo.steps_per_generation=1", "custom.extra.grpo.num_iterations=1"),
)
TEACHERS = "custom.extra.distill.teachers="
ITSELF = f"{TEACHERS}[{{model: {MODEL}}}]"


def damaged(trainer):
    with torch.no_grad():
        for number, weight in enumerate(trainer.model.parameters()):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight += 0.05 * noise
    return trainer


def judged(trainer, policy, teacher):
    """[n, V] of policy and teacher, and the tokens, at what the policy wrote of the step's episodes."""
    rows, theirs, tokens = [], [], []
    for rollout in trainer.report.rollouts:
        episode = rollout.trajectory
        pair = episode.prompt_token_ids, episode.token_ids
        with torch.no_grad():
            ours, others = (list(logprobs_of(model, *pair)) for model in (policy, teacher))
        rows += compress(ours, episode.written)
        theirs += compress(others, episode.written)
        tokens += compress(episode.token_ids, episode.written)
    return torch.stack(rows), torch.stack(theirs), torch.tensor(tokens)


@pytest.mark.scenario(
    "distillation/turns-are-taught-observations-are-not",
    clauses=["distillation/episodes-of-an-environment-are-taught-turn-by-turn#1,2"],
)
def test_turns_are_taught_observations_are_not(tmp_path):
    trainer = damaged(make_trainer(tmp_path, *DISTILL, ITSELF, *DIVERGENCE, "training.max_steps=1"))
    before = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    before.load_state_dict(trainer.model.state_dict())
    trainer.train()
    teacher = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    rows, theirs, tokens = judged(trainer, before.eval(), teacher.eval())
    num_all = sum(len(rollout.trajectory.token_ids) for rollout in trainer.report.rollouts)
    assert 0 < len(tokens) < num_all, "there are observations"
    (step,) = steps_of(trainer)
    ours, its = (at.gather(-1, tokens[:, None])[:, 0].mean().item() for at in (rows, theirs))
    divergence = jensen_shannon(rows, theirs, beta=0.5, top_k=8).mean().item()
    assert step["teacher_kl"] == pytest.approx(ours - its, rel=1e-4)
    assert step["teacher_logprob"] == pytest.approx(its, rel=1e-4)
    assert step["divergence"] == pytest.approx(divergence, rel=1e-4)
    assert divergence > 1e-3


@pytest.mark.scenario(
    "distillation/an-environment-s-pay-is-not-learnt-from",
    clauses=["distillation/episodes-of-an-environment-are-taught-turn-by-turn#3"],
)
def test_an_environments_pay_is_not_learnt_from(tmp_path):
    trainer = make_trainer(tmp_path, *DISTILL, ITSELF)
    before = weights_of(trainer.model)
    trainer.train()
    shown = steps_of(trainer)
    assert any(step["reward_std"] > 0 for step in shown)
    assert all(abs(step["teacher_kl"]) < 1e-5 for step in shown)
    after = weights_of(trainer.model)
    assert all(torch.allclose(after[name], weight, atol=1e-6) for name, weight in before.items())


@pytest.mark.scenario(
    "distillation/an-environment-s-pay-is-learnt-from-beside-a-teacher",
    clauses=["distillation/episodes-of-an-environment-are-taught-turn-by-turn#5"],
)
def test_an_environments_pay_is_learnt_from_beside_a_teacher(tmp_path):
    """The teacher is the policy, so the step is that of the pay alone."""
    once = ("training.max_steps=1", "training.warmup_steps=0")
    weight = "custom.extra.distill.environment_weight=1"
    mixed = make_trainer(tmp_path / "mixed", *DISTILL, ITSELF, weight, *once)
    alone = make_trainer(tmp_path / "alone", *DISTILL, "custom.trainer_variant=grpo", *once)
    before = weights_of(mixed.model)
    mixed.train()
    alone.train()
    found, expected = weights_of(mixed.model), weights_of(alone.model)
    assert any(not torch.equal(weight, before[name]) for name, weight in expected.items())
    assert all(torch.allclose(found[name], weight, atol=1e-6) for name, weight in expected.items())


@pytest.mark.scenario(clauses=["distillation/episodes-of-an-environment-are-taught-turn-by-turn#6"])
def test_a_weight_of_pay_needs_an_environment_that_pays_and_a_teacher():
    key = "custom.extra.distill.environment_weight"
    taught = (*DISTILL, "~.decoding.temperature=1", f"{TEACHERS}[{{model: a}}]", f"{key}=0.5")
    assert [(one.code, one.key) for one in problems_of(*taught)] == [("pay-unused", key)]
    grpo = (*taught, "custom.trainer_variant=grpo", "custom.extra.environment.name=a:B")
    assert ("pay-unused", key) in {(one.code, one.key) for one in problems_of(*grpo)}
    assert config_with(*taught, "custom.extra.environment={name: 'a:B', max_response_tokens: 512}")


@pytest.mark.scenario(clauses=["distillation/episodes-of-an-environment-are-taught-turn-by-turn#2"])
def test_an_evaluation_counts_what_the_policy_wrote(tmp_path):
    trainer = damaged(make_trainer(tmp_path, *DISTILL, ITSELF))
    metrics = trainer.evaluate()
    found = []
    teacher = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for rollout in trainer.source.roll_out(trainer.eval_dataset, 0, purpose="eval"):
        episode = rollout.trajectory
        with torch.no_grad():
            rows = logprobs_of(teacher, episode.prompt_token_ids, episode.token_ids)
        own = rows.gather(-1, torch.tensor(episode.token_ids)[:, None])[:, 0]
        found += compress(own.tolist(), episode.written)
    assert metrics["eval_teacher_logprob"] == pytest.approx(sum(found) / len(found), rel=1e-4)
    assert "eval_reward" in metrics


class OftenBreaks(TwoTreasures):
    """Raises in every third step of a process."""

    steps = count()

    def clone(self, rng):
        twin = OftenBreaks(self.size, self.horizon)
        twin.__dict__.update(self.__dict__)
        return twin

    def step(self, action):
        if next(self.steps) % 3 == 2:
            raise RuntimeError("broke")
        return super().step(action)


@pytest.mark.scenario(clauses=["distillation/episodes-of-an-environment-are-taught-turn-by-turn#4"])
def test_episodes_that_failed_teach_nothing(tmp_path):
    breaks = (f"custom.extra.environment.name={__name__}:OftenBreaks", "custom.extra.environment.failed_share=1.0")
    trainer = damaged(make_trainer(tmp_path, *DISTILL, ITSELF, "training.max_steps=1", *breaks))
    before = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    before.load_state_dict(trainer.model.state_dict())
    trainer.train()
    failures = [bool(rollout.trajectory.failure) for rollout in trainer.report.rollouts]
    assert 0 < sum(failures) < len(failures)
    trainer.report.rollouts = [one for one in trainer.report.rollouts if not one.trajectory.failure]
    teacher = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    _, theirs, tokens = judged(trainer, before.eval(), teacher.eval())
    (step,) = steps_of(trainer)
    assert step["teacher_logprob"] == pytest.approx(theirs.gather(-1, tokens[:, None]).mean().item(), rel=1e-4)


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#6"])
def test_episodes_played_ahead_are_judged_ahead(tmp_path):
    """Each once, by the server, with the figures of the same teacher beside the policy."""
    found = {}
    three = (*DISTILL, *DIVERGENCE, "training.max_steps=3", "training.learning_rate=0", "training.packing=false")
    three = (*three, "custom.extra.rollout_matching.decoding.top_k=1")  # whatever is written together
    with serving(teacher := TeacherDouble(MODEL)) as url:
        for name, one in (("here", ITSELF), ("there", f"{TEACHERS}[{{base_url: '{url}'}}]")):
            trainer = damaged(make_trainer(tmp_path / name, *three, one))
            attach_servers(trainer, "ahead")
            trainer.train()
            trainer.overlap.prefetch.close()
            found[name] = [(step["teacher_kl"], step["divergence"]) for step in steps_of(trainer)]
    assert len(teacher.judged) == 3 * 3 * 2
    for ours, theirs in zip(found["here"], found["there"], strict=True):
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-5)


def test_an_episode_must_fit_the_teacher(tmp_path):
    config = load_config(
        ROOT / "fixtures/tasks/treasures.yaml",
        [
            *(f"model.model={MODEL}", *DISTILL, ITSELF, f"training.output_dir={tmp_path}"),
            "custom.extra.environment.max_response_tokens=125",
            *(f"custom.{split}_jsonl={ROOT}/fixtures/tasks/treasures.jsonl" for split in ("train", "val")),
            "global_max_length=128",
        ],
    )
    samples, _ = load_checked(config)
    with pytest.raises(Exception, match="max_response_tokens") as refused:
        check_teachers(config, make_template(config), samples)
    assert refused.value.code == "teacher-too-short"
    assert not isinstance(refused.value, BadSamples)


@pytest.mark.scenario(clauses=["distillation/some-steps-may-learn-from-answers-of-the-data-set#5"])
def test_given_answers_are_no_episodes():
    keys = (*DISTILL[:1], "~.decoding.temperature=1", f"{TEACHERS}[{{model: a}}]", *DIVERGENCE)
    given = ("custom.extra.distill.lmbda=0.5", "custom.extra.distill.answers=a", "custom.extra.grpo.num_generations=1")
    played = ("custom.extra.environment.name=a:b", "custom.extra.environment.max_response_tokens=64")
    found = [(error.code, error.key) for error in problems_of(*keys, *given, *played)]
    assert ("off-policy-undefined", "custom.extra.distill.lmbda") in found
    assert config_with(*keys, *given)
