"""An evaluation is a rollout per held-out scene: it measures, writes them down, and learns nothing."""

import dataclasses
import json

import pytest

from conformance.rollout.digits import scenes
from conformance.trainer.small_run import events, make_trainer, step_between, weights_of
from rollmatch.records import Rollout

BRIEF = "custom.extra.rollout_matching.max_new_tokens=8"


class SeesEverySecondScene:
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
        nothing = Rollout(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            response_token_ids=(),
            finish_reason="stop",
            policy_version=self.policy_version,
        )
        seen = dataclasses.replace(request.sample, objects=()) if blind else request.sample
        (segment,), _ = self.target.make_segments([seen], [nothing])
        return dataclasses.replace(nothing, response_token_ids=segment.token_ids[segment.prompt_len : -1])


def test_an_evaluation_measures_writes_its_scenes_and_learns_nothing(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.source.fence.backend = SeesEverySecondScene(trainer.learner.objective.target)
    before = weights_of(trainer.model)
    metrics = trainer.evaluate()
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
