"""One step, for real: the digits model, its own generate(), float32."""

import dataclasses
from itertools import chain

import pytest
import torch
from transformers import TrainerCallback

from conformance.doubles.refusals import refused
from conformance.doubles.small_run import KEPT, events, make_trainer, requested, step_between, trained, weights_of
from rollmatch.journal import read_journal
from rollmatch.objectives.rollout_matching.answer_format import DropReason
from rollmatch.rollout.backend import RolloutBackend
from rollmatch.training.report import PHASES
from rollmatch.weights.named_weights import named_weights

TOLERANCE = 1e-5
"""Of the whole step's length: what sums in another order may differ by in float32. A wrong divisor differs by 0.5."""
LONG_STEP = "training.learning_rate=1"
"""A step of length 1 (gradients are clipped to that), next to which the rounding of the weights is small."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four samples in one packed row: a step of one forward pass."""
    return trained(tmp_path_factory.mktemp("whole"), "training.packing=true", LONG_STEP, KEPT)


BRIEF = "custom.extra.rollout_matching.max_new_tokens=12"
"""An answer that breaks off before its first box: an adapter makes every token dearer."""
LORA = (
    *("training.packing=true", "tuner.train_type=lora", "tuner.lora_rank=4"),
    *("tuner.target_regex=.*(q_proj|up_proj)", "training.per_device_train_batch_size=2", BRIEF),
)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The step of float32 adapters whose activations are kept."""
    folder = tmp_path_factory.mktemp("adapted")
    return trained(folder, LONG_STEP, *LORA, "training.gradient_checkpointing=false")[1]


def test_adapters_learn_the_same_with_activations_computed_again(adapted, tmp_path):
    again, checkpointed = trained(tmp_path, LONG_STEP, *LORA, "training.gradient_checkpointing=true")
    assert again.model.get_base_model().is_gradient_checkpointing
    assert adapted.norm() > 0
    assert (checkpointed - adapted).norm() < TOLERANCE * adapted.norm()


def test_a_frozen_base_in_bfloat16_learns_float32_adapters(adapted, tmp_path):
    """As a large model on a GPU: half the memory for what does not move, whole numbers for what does."""
    halves = ("model.torch_dtype=bfloat16", "training.bf16=true", "training.gradient_checkpointing=true")
    trainer, step = trained(tmp_path, LONG_STEP, *LORA, *halves)
    dtypes = {weight.requires_grad: weight.dtype for weight in trainer.model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert torch.nn.functional.cosine_similarity(step.float(), adapted, dim=0) > 0.99
    sent = dict(named_weights(trainer.model))
    assert {weight.dtype for weight in sent.values()} == {torch.bfloat16}
    assert not any("lora" in name for name in sent)


def test_a_step_moves_the_language_model_the_vision_tower_and_the_tied_head(whole, tmp_path):
    trainer, step = whole
    assert step.isfinite().all()
    fresh = weights_of(make_trainer(tmp_path).model)
    moved = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, fresh[name])}
    assert {"model.language_model.embed_tokens.weight", "model.visual.patch_embed.proj.weight"} <= moved
    assert trainer.model.lm_head.weight is trainer.model.model.language_model.embed_tokens.weight


def test_the_log_record_holds_the_figures_of_its_step(whole):
    trainer, _ = whole
    record = trainer.state.log_history[0]
    assert {f"time/{phase}_s" for phase in PHASES} | {f"drop/{reason}" for reason in DropReason} <= record.keys()
    assert record["loss"] == pytest.approx(record["loss_ce"] + record["loss_coord"], rel=1e-4)
    assert record["segments"] == 4
    assert record["carried"] == 0
    assert record["rollout_tokens"] == sum(len(r.response_token_ids) for r in trainer.report.rollouts)
    assert record["learn_tokens"] == sum(batch.num_tokens for batch in trainer.report.batches)
    assert record["fill"] == pytest.approx(record["learn_tokens"] / 2048)
    truth = sum(len(sample.objects) for sample in trainer.train_dataset if sample.sample_id in requested(trainer))
    assert record["recall"] * truth == pytest.approx(truth - record["appended"])
    assert record["time/rollout_s"] > 0
    assert record["time/learn_s"] > 0
    names = [event["event"] for event in read_journal(trainer.source.journal.path)]
    assert names == ["synced", "requested", "generated", "completions", "packed", "timeline", "saved"]
    (packed,), (asked,) = events(trainer, "packed"), events(trainer, "requested")
    assert sorted(chain(*packed["sample_ids"])) == sorted(asked["sample_ids"])
    assert asked["num_requests"] == len(asked["seeds"]) == events(trainer, "generated")[0]["num_rollouts"] == 4


class Notes(TrainerCallback):
    """A user's own callback."""

    def __init__(self):
        self.calls = []

    def on_step_end(self, args, state, control, **kwargs):
        self.calls.append(("step", state.global_step))

    def on_log(self, args, state, control, logs, **kwargs):
        self.calls.append(("log", "loss_coord" in logs))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.calls.append(("evaluate", metrics["eval_num_scenes"]))

    def on_save(self, args, state, control, **kwargs):
        self.calls.append(("save", state.global_step))


def test_callbacks_of_the_users_are_called(tmp_path):
    notes = Notes()
    trainer, _ = trained(tmp_path, "training.eval_steps=1", KEPT, callbacks=[notes])
    assert notes.calls == [("step", 1), ("log", True), ("log", False), ("evaluate", 4.0), ("save", 1), ("log", False)]
    assert trainer.state.global_step == 1


class OtherPrompt(RolloutBackend):
    """A backend whose engine saw one token of the prompt differently."""

    def __init__(self, backend):
        self.backend = backend
        self.policy_version = 0

    def rest(self):
        pass

    def push(self, weights, *, version):
        self.backend.push(weights, version=version)
        self.policy_version = version

    def generate(self, requests, decoding):
        first, *others = self.backend.generate(requests, decoding)
        head, _, *tail = first.prompt_token_ids
        return [dataclasses.replace(first, prompt_token_ids=(head, 0, *tail)), *others]


def test_a_prompt_the_engine_saw_differently_stops_the_run(tmp_path):
    trainer = make_trainer(tmp_path)
    fence = trainer.source.fence
    fence.backend, backend = OtherPrompt(fence.backend), fence.backend
    before = weights_of(trainer.model)
    with refused("prompt-mismatch") as caught:
        trainer.train()
    assert caught.value.key in {sample.origin for sample in trainer.train_dataset}
    assert "position 1" in caught.value.problem
    assert not step_between(before, weights_of(trainer.model)).any()
    assert events(trainer, "packed") == []
    fence.backend = backend
    trainer.train()
    assert trainer.state.global_step == 1
