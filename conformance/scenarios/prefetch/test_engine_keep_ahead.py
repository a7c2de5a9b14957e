"""A run whose weights change within the responses of a real server."""

import time
from contextlib import ExitStack
from itertools import chain

import pytest
from transformers import TrainerCallback

from conformance.doubles.digits import scenes, unseen
from conformance.doubles.instance import free_port
from conformance.doubles.overlapped import note_what_is_learnt
from conformance.doubles.processes import stopped
from conformance.doubles.small_run import events, make_trainer, requested
from rollmatch.rollout.overlap import Ahead

pytestmark = pytest.mark.engine
R = "custom.extra.rollout_matching"
GRPO = (
    "custom.trainer_variant=grpo",
    "custom.extra.grpo.num_generations=4",
    "custom.extra.grpo.steps_per_generation=1",
    "custom.extra.grpo.num_iterations=1",
    "custom.extra.grpo.old_logprobs=server",
    "custom.extra.grpo.rewards=[{function: conformance.doubles.rewards:digit_sum}]",
    "training.packing=false",
    f"{R}.decoding.temperature=2",
    f"{R}.max_new_tokens=160",
    "training.max_steps=5",
    "training.per_device_train_batch_size=1",
)
SERVED = (f"{R}.rollout_backend=vllm", f"{R}.vllm.mode=server", f"{R}.overlap=ahead", f"{R}.max_staleness=2")
SERVED += (f"{R}.vllm.sync.in_flight=keep",)
PLAYED = (
    "custom.extra.grpo.rewards=[]",
    "custom.extra.environment.name=conformance.oracle.echo:Echo",
    "custom.extra.environment.observations=text",
    "custom.extra.environment.max_turns=2",
    "custom.extra.environment.max_response_tokens=400",
)
BRIEF = {"samples": unseen(scenes("train")[:8]), "eval_samples": unseen(scenes()[:1])}


class HeldWhileLearning(TrainerCallback):
    """Engines write nothing while a step is learnt: on a slow machine, too, syncs come within responses.

    Where nothing is requested that is not there yet, as beside the last steps, nothing is held.
    """

    def __init__(self, instance):
        self.instance, self.holding = instance, ExitStack()

    def on_step_begin(self, args, state, control, **_):
        end = time.monotonic() + 1
        while time.monotonic() < end:
            if self.instance.server.health()["running"]:
                self.holding.enter_context(stopped(*self.instance.workers()))
                return

    def on_step_end(self, args, state, control, **_):
        self.holding.close()


def served_by(server):
    return f"{R}.vllm.server.base_url={server.url}", f"{R}.vllm.server.group_port={free_port()}"


@pytest.mark.scenario(
    "prefetch/five-steps-in-which-weights-change-within-responses",
    clauses=["prefetch/a-sync-comes-within-responses#1,2,3"],
)
@pytest.mark.parametrize("played", [(), pytest.param(PLAYED, marks=pytest.mark.wide)], ids=["responses", "turns"])
def test_a_run_learns_from_responses_of_several_versions_as_old_as_allowed(played, instance, tmp_path):
    held = HeldWhileLearning(instance)
    trainer = make_trainer(tmp_path, *GRPO, *played, *SERVED, *served_by(instance.server), **BRIEF, callbacks=[held])
    assert isinstance(trainer.overlap, Ahead)
    note_what_is_learnt(trainer)
    try:
        trainer.train()
    finally:
        held.holding.close()
        trainer.source.fence.backend.close()
    generated = [event for event in events(trainer, "generated") if event.get("policy_versions")]
    runs = list(chain(*(event["policy_versions"] for event in generated)))
    moved = [each for each in runs if len(each) > 1]
    assert moved, "no sync came within a response"
    sent = {event["version"]: event["step"] for event in events(trainer, "synced")}
    for event in generated:
        ages = [event["step"] - sent[version] for each in event["policy_versions"] for version, _ in each]
        assert 0 <= min(ages) <= max(ages) <= 2
        assert event["policy_version"] == min(version for each in event["policy_versions"] for version, _ in each)
        assert sum(length for each in event["policy_versions"] for _, length in each) >= event["num_tokens"]
    assert all([v for v, _ in each] == sorted({v for v, _ in each}) for each in runs)
    assert max(trainer.ages) <= 2
    assert len(events(trainer, "generated")) >= 5
    assert len(set(requested(trainer))) == len(requested(trainer)) / 4, "no sample twice"
