"""Stage 1: plain SFT on the true answers, with the data, masks, packing and evaluation of stage 2."""

import pytest

from conformance.doubles.configs import config_with
from conformance.doubles.digits import scenes
from conformance.doubles.refusals import refused
from conformance.doubles.small_run import events, make_trainer
from rollmatch.config.servers import uses_servers
from rollmatch.objectives.rollout_matching.target import serialize_objects
from rollmatch.rollout.hf import HfBackend

SFT = "custom.trainer_variant=sft"
LONG = "custom.extra.rollout_matching."
PLAIN = f"{LONG}target_sigma=2.0"
LARGEST = {"coord_tokens": None, "integers": (999, 999), "qwen3_vl": (1000, 1000), "qwen2_5_vl": (127, 127)}
"""By answer format, for scenes of 128 x 128 pixels, which the processor keeps."""
SERVERS = (f"{LONG}vllm.mode=server", f"{LONG}vllm.server={{base_url: http://127.0.0.1:9, group_port: 51216}}")


@pytest.mark.scenario(
    "target/a-step-of-stage-1", clauses=["target/stage-1-teaches-the-true-answer-without-rollouts#1,2"]
)
@pytest.mark.parametrize(
    ("answer_format", "packing"),
    [("coord_tokens", "true"), ("integers", "false"), ("qwen3_vl", "true"), ("qwen2_5_vl", "false")],
)
def test_a_step_of_stage_1_teaches_whole_answers(answer_format, packing, tmp_path):
    samples = scenes("train")[:4]
    trainer = make_trainer(
        tmp_path, SFT, PLAIN, f"{LONG}answer_format={answer_format}", f"training.packing={packing}", samples=samples
    )
    trainer.train()
    taught = [segment for batch in trainer.report.batches for segment in batch.segments]
    vocabulary = trainer.source.template.vocabulary
    texts = {vocabulary.text(s.token_ids[s.prompt_len : -1]) for s in taught}
    format_of = trainer.learner.objective.target.format_of
    assert texts == {serialize_objects(sample.objects, format_of(sample)) for sample in samples}
    assert format_of(samples[0]).largest == LARGEST[answer_format]
    assert [event for event in events(trainer, "requested") if event["purpose"] == "train"] == []
    assert events(trainer, "synced") == []
    logged = trainer.state.log_history[0]
    assert logged["appended"] == sum(len(sample.objects) for sample in samples)
    assert (logged["loss_coord"] > 0) == (answer_format == "coord_tokens")
    assert "f1" not in logged
    assert trainer.evaluate()["eval_num_scenes"] == 4.0
    assert len(events(trainer, "synced")) == 1


def test_new_embeddings_learn_beside_adapters(tmp_path):
    lora = ("tuner.train_type=lora", "tuner.trainable_token_indices=coord_tokens", "training.learning_rate=0.1")
    trainer = make_trainer(tmp_path, SFT, *lora, samples=scenes("train")[:4])
    rows = {name: weight for name, weight in trainer.model.named_parameters() if "trainable_tokens_delta" in name}
    before = {name: weight.detach().clone() for name, weight in rows.items()}
    trainer.train()
    assert [tuple(weight.shape) for weight in rows.values()] == [(1000, 192)]
    assert all(not weight.equal(before[name]) for name, weight in rows.items())


@pytest.mark.scenario(
    "target/stage-1-where-a-server-is-configured", clauses=["target/stage-1-teaches-the-true-answer-without-rollouts#3"]
)
def test_stage_1_needs_no_server(tmp_path):
    trainer = make_trainer(tmp_path, SFT, f"{LONG}rollout_backend=vllm", *SERVERS)
    assert isinstance(trainer.source.fence.backend, HfBackend)
    words = [part.replace(LONG, "~.") for part in (f"{LONG}rollout_backend=vllm", *SERVERS)]
    assert not uses_servers(config_with(SFT, *words))
    assert uses_servers(config_with(*words))


@pytest.mark.scenario(
    "target/overlap-without-rollouts-is-refused",
    "target/stage-1-without-overlap-is-accepted",
    clauses=["target/stage-1-teaches-the-true-answer-without-rollouts#4"],
)
def test_stage_1_overlaps_with_nothing():
    words = [part.replace(LONG, "~.") for part in SERVERS]
    with refused("overlap-of-another-objective", f"{LONG}overlap"):
        config_with(SFT, *words, "~.overlap=ahead")
    assert config_with(SFT, *words, "~.overlap='off'")
