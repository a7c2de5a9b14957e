"""Evaluations measure and learn nothing; a rollout side that fails leaves a checkpoint of the last whole step."""

import dataclasses
import json
import time

import pytest
import torch

from conformance.doubles.digits import scenes
from conformance.doubles.records import make_reply
from conformance.doubles.small_run import events, make_trainer, requested, step_between, weights_of
from rollmatch.dialects.watch import ServerDied
from rollmatch.model.images import ImagePreparation
from rollmatch.rollout.backend import RolloutBackend
from rollmatch.rollout.hf import HfBackend

BRIEF = "custom.extra.rollout_matching.max_new_tokens=8"


class SeesEverySecondScene(RolloutBackend):
    """A backend that answers with the truth and with no object by turns."""

    policy_version = 0

    def __init__(self, target):
        self.target = target

    def rest(self):
        pass

    def push(self, weights, *, version):
        self.policy_version = version

    def generate(self, requests, decoding):
        return [self.answer(request, blind=bool(place % 2)) for place, request in enumerate(requests)]

    def answer(self, request, *, blind):
        nothing = make_reply(request, (), version=self.policy_version)
        seen = dataclasses.replace(request.sample, objects=()) if blind else request.sample
        (segment,), _ = self.target.make_segments([seen], [nothing])
        return dataclasses.replace(nothing, response_token_ids=segment.token_ids[segment.prompt_len : -1])


def test_an_evaluation_prepares_each_image_once(tmp_path, monkeypatch):
    trainer, prepared = make_trainer(tmp_path, BRIEF), []
    assert isinstance(trainer.source.fence.backend, HfBackend)
    template = trainer.source.template
    prepare = template.image_features
    counting = ImagePreparation(lambda sample: prepared.append(sample.sample_id) or prepare(sample))
    monkeypatch.setattr(template, "preparation", counting)
    trainer.evaluate()
    assert sorted(prepared) == [sample.sample_id for sample in trainer.eval_dataset]


def test_an_evaluation_measures_writes_its_scenes_and_learns_nothing(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.source.fence.backend = SeesEverySecondScene(trainer.learner.objective.target)
    before, began = weights_of(trainer.model), time.perf_counter()
    metrics = trainer.evaluate()
    assert 0 < metrics["eval_seconds"] < time.perf_counter() - began
    assert not step_between(before, weights_of(trainer.model)).any()
    (event,) = events(trainer, "evaluated")
    assert event["step"] == 0
    record = json.loads((tmp_path / event["file"]).read_text())
    assert {f"eval_{name}": value for name, value in record["metrics"].items()} == metrics
    assert record["iou_threshold"] == 0.5
    assert [scene["sample_id"] for scene in record["scenes"]] == [sample.sample_id for sample in scenes()[:4]]
    truth = [len(sample.objects) for sample in scenes()[:4]]
    assert [len(scene["truth"]) for scene in record["scenes"]] == truth
    assert [len(scene["predicted"]) for scene in record["scenes"]] == [truth[0], 0, truth[2], 0]
    assert {found["iou"] for scene in record["scenes"] for found in scene["predicted"]} == {1.0}
    assert metrics["eval_precision"] == 1.0
    assert metrics["eval_recall"] == pytest.approx((truth[0] + truth[2]) / sum(truth))
    assert metrics["eval_f1"] == pytest.approx(2 * (truth[0] + truth[2]) / (truth[0] + truth[2] + sum(truth)))
    assert metrics["eval_num_scenes"] == 4
    assert trainer.state.log_history[-1]["eval_f1"] == metrics["eval_f1"]


@pytest.mark.scenario(clauses=["observability/before-and-after-are-comparable#1"])
def test_an_evaluation_before_the_first_step_is_computed_as_one_after_the_last(tmp_path):
    """Weights that do not move give the same answers. In float32, as the first one was once, others come."""
    trainer = make_trainer(tmp_path, BRIEF, "training.bf16=true", "training.learning_rate=0")
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    plain = make_trainer(tmp_path / "plain", BRIEF)
    plain.evaluate()
    files = [tmp_path / event["file"] for event in events(trainer, "evaluated")]
    files.append(tmp_path / "plain" / events(plain, "evaluated")[0]["file"])
    before, after, other = (json.loads(file.read_text()) for file in files)
    assert before["scenes"] == after["scenes"]
    assert before["precision"] == after["precision"] == "float32 weights, bfloat16 autocast"
    assert other["precision"] == "float32"


def test_an_evaluation_of_other_samples_goes_by_its_own_prefix(tmp_path):
    trainer = make_trainer(tmp_path, BRIEF, is_shallow=True)
    metrics = trainer.evaluate(list(scenes()[4:6]), metric_key_prefix="held_out")
    assert metrics["held_out_num_scenes"] == 2
    assert not [name for name in metrics if not name.startswith("held_out_")]


def test_an_evaluation_reuses_the_weights_of_its_step(tmp_path):
    trainer = make_trainer(tmp_path, BRIEF, is_shallow=True)
    trainer.evaluate()
    trainer.evaluate()
    trainer.train()
    assert [event["step"] for event in events(trainer, "synced")] == [0]


SHORT = ("training.max_steps=3", "training.save_steps=1000", "custom.extra.rollout_matching.max_new_tokens=8")


def fail_at(trainer, call):
    """The backend's call of this number (from 1) and every later one fails."""
    backend, calls = trainer.source.fence.backend, []
    generate = backend.generate

    def counted(requests, decoding):
        calls.append(1)
        if len(calls) >= call:
            raise ServerDied("is gone", key="http://server")
        return generate(requests, decoding)

    backend.generate = counted


@pytest.mark.scenario(
    "server-connection/a-run-whose-servers-die-is-resumed-where-it-stopped",
    clauses=["server-connection/a-call-outlives-a-busy-server#7"],
)
def test_a_run_whose_servers_die_is_resumed_where_it_stopped(tmp_path):
    whole = make_trainer(tmp_path / "whole", *SHORT, is_shallow=True)
    whole.train()
    broken = make_trainer(tmp_path / "broken", *SHORT, is_shallow=True)
    fail_at(broken, 3)
    with pytest.raises(ServerDied):
        broken.train()
    checkpoint = tmp_path / "broken" / "checkpoint-2"
    assert (checkpoint / "trainer_state.json").exists()
    resumed = make_trainer(tmp_path / "broken", *SHORT, is_shallow=True)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert requested(resumed)[-4:] == requested(whole)[-4:]
    ours, theirs = weights_of(resumed.model), weights_of(whole.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_nothing_is_saved_before_the_first_step(tmp_path):
    trainer = make_trainer(tmp_path, *SHORT, is_shallow=True)
    fail_at(trainer, 1)
    with pytest.raises(ServerDied):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))
