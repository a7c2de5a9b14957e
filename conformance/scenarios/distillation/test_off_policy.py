"""Steps that learn from the data set's own answers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from conformance.doubles.configs import config_with, problems_of
from conformance.doubles.distilled import (
    DIVERGENCE,
    MODEL,
    PROMPTED,
    asked,
    checked,
    jensen_shannon,
    logprobs_of,
    make_trainer,
    samples,
    steps_of,
)
from conformance.doubles.small_run import events

D, G = "custom.extra.distill.", "custom.extra.grpo."
ONE = f"{G}num_generations=1"
ANSWERS = (f'{D}answers="{{sum}}"', ONE)
KEY = f"{D}lmbda"


@pytest.mark.scenario(
    "distillation/no-step-generates",
    clauses=["distillation/some-steps-may-learn-from-answers-of-the-data-set#2,3"],
)
@pytest.mark.parametrize("way", [(), ("training.packing=true", "global_max_length=512")], ids=["padded", "packed"])
def test_no_step_generates(tmp_path, way):
    trainer = make_trainer(tmp_path, PROMPTED, *DIVERGENCE, *ANSWERS, f"{KEY}=0", *way)
    trainer.train()
    assert events(trainer, "requested") == events(trainer, "generated") == []
    (given,) = events(trainer, "given")
    segments = [segment for batch in trainer.report.batches for segment in batch.segments]
    assert given["num_answers"] == len(segments) == 8
    model, template, found = (
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        trainer.source.template,
        [],
    )
    by_id = {sample.sample_id: sample for sample in samples()}
    for segment in segments:
        sample = by_id[segment.sample.sample_id]
        target = segment.token_ids[segment.prompt_len :]
        assert target == (*template.vocabulary.encode(str(sample.metadata["sum"])), template.vocabulary.stop_id)
        prompt = asked(template, sample, "{question} {sum}")
        with torch.no_grad():
            ours, theirs = (
                logprobs_of(model, ids, target) for ids in (segment.token_ids[: segment.prompt_len], prompt)
            )
        found.append(jensen_shannon(ours, theirs, beta=0.5, top_k=8))
    (step,) = steps_of(trainer)
    assert step["divergence"] == pytest.approx(torch.cat(found).mean().item(), rel=1e-4)
    assert step["rollout_tokens"] == 0


DISTILL = ("custom.trainer_variant=distill", "~.decoding.temperature=1", f"{D}teachers=[{{model: a}}]", ONE)
HALF = (*DISTILL, f"{D}loss=divergence", f"{D}beta=0", f"{D}top_k=8", f"{KEY}=0.5", f"{D}answers=a")
REWARDS = f"{G}rewards=[{{function: builtins:len}}]"


@pytest.mark.scenario(clauses=["distillation/some-steps-may-learn-from-answers-of-the-data-set#4,5"])
@pytest.mark.parametrize(
    ("change", "code", "key"),
    [
        ((f"{D}answers=null",), "off-policy-without-answers", f"{D}answers"),
        ((f"{KEY}=1",), "off-policy-unused", f"{D}answers"),
        ((f"{D}loss=sampled", f"{D}beta=null", f"{D}top_k=null"), "off-policy-undefined", KEY),
        ((f"{G}num_generations=2",), "off-policy-undefined", KEY),
        ((f"{G}num_generations=2", REWARDS), "off-policy-undefined", KEY),
        ((f"{G}beta=0.1",), "off-policy-undefined", KEY),
        (
            ("~.overlap=ahead", "rlhf.use_vllm=true", "rlhf.vllm_mode=server", "rlhf.vllm_server_host=[localhost]"),
            "off-policy-undefined",
            KEY,
        ),
        (("custom.trainer_variant=grpo", REWARDS, f"{G}num_generations=2"), "off-policy-undefined", KEY),
    ],
)
def test_what_has_no_definition_is_refused(change, code, key):
    assert (code, key) in {(error.code, error.key) for error in problems_of(*HALF, *change)}
    assert config_with(*HALF)


@pytest.mark.scenario(clauses=["distillation/some-steps-may-learn-from-answers-of-the-data-set#6"])
def test_an_answer_that_does_not_fit_is_refused_before_start():
    half = (*DIVERGENCE, PROMPTED, f"{KEY}=0.5", ONE)
    assert checked(*half, ANSWERS[0]) == []
    error = checked(*half, f'{D}answers="{{sum}} {"and so on " * 9}"')[0]
    assert (error.code, ".jsonl:" in error.key) == ("off-policy-answer-too-long", True)
    assert checked(*half, f'{D}answers="{{colour}}"')[0].code == "teacher-prompt-field"
