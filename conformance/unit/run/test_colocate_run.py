"""``rollmatch train`` with its default backend, the real engine, from the first line to the page."""

import json

import pytest
import torch
from peft import PeftModel

from conformance.doubles.digits import load_model, requests_for, scenes, template_of
from conformance.doubles.division import WEIGHT_FILES
from conformance.doubles.started import journal_of, started, train_command
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend

pytestmark = pytest.mark.engine

SMALL = ("training.per_device_train_batch_size=4", "training.report_to=none", "training.learner_threads=1")
NUM_SCENES, MAX_NEW_TOKENS = 8, 48


ADAPTERS = ("tuner.train_type=lora", "tuner.lora_rank=4", "training.max_steps=1", "training.warmup_steps=0")
VLLM = "custom.extra.rollout_matching.vllm"
SHORT_STEPS = (f"{VLLM}.max_model_len=512", f"{VLLM}.max_num_batched_tokens=512", f"{VLLM}.max_num_seqs=64")
RUNS = {
    "full": (
        *("training.max_steps=2", "training.per_device_train_batch_size=16", "training.save_steps=100"),
        *(*SHORT_STEPS, "custom.extra.rollout_matching.decoding.temperature=1"),
    ),
    "lora": (*ADAPTERS, "training.learning_rate=0.05"),
}


def command_of(folder):
    overrides = (
        *(f"training.output_dir={folder}", f"training.eval_scenes={NUM_SCENES}"),
        f"custom.extra.rollout_matching.max_new_tokens={MAX_NEW_TOKENS}",
    )
    return train_command(*SMALL, *overrides, *RUNS[folder.name])


def run_of(name, folder):
    """The directory of a run."""
    with started(command_of(folder / name), folder / f"{name}.txt") as running:
        assert running.wait() == 0, running.output()
        assert "page:" in running.output()
    return folder / name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of two steps, all weights, rollouts sampled."""
    return run_of("full", tmp_path_factory.mktemp("colocate"))


def test_the_run_leaves_its_page_and_its_evaluations(run):
    assert (run / "run.html").stat().st_size > 1000
    for step in (0, 2):
        record = json.loads((run / f"evaluations/step-{step:06d}.json").read_text())
        assert len(record["scenes"]) == NUM_SCENES
    assert [line["step"] for line in journal_of(run, "step")] == [1, 2]
    assert len(journal_of(run, "finished")) == 1


def test_weights_go_to_the_engine_before_the_first_rollout_of_every_step(run):
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    version, order = 0, []
    for line in lines:
        if line["event"] == "synced":
            assert line["version"] == version + 1
            version = line["version"]
            order.append(("synced", line["step"]))
        if line["event"] == "generated":
            assert line["policy_version"] == version
            order.append((line["purpose"], line["step"]))
    assert order == [
        *(("synced", 0), ("eval", 0), ("train", 0)),
        *(("synced", 1), ("train", 1)),
        *(("synced", 2), ("eval", 2)),
    ]
    assert [line["policy_version"] for line in lines if line["event"] == "step"] == [1, 2]


def test_no_weights_touch_the_disk_between_checkpoints(run):
    files = [path.relative_to(run) for pattern in WEIGHT_FILES for path in run.rglob(pattern)]
    assert {path.parts[0] for path in files} == {"checkpoint-2"}


def test_sampled_prompts_that_do_not_fit_into_a_step_together_are_not_split(run):
    """A CPU's engine would die of it."""
    generated = [line["num_rollouts"] for line in journal_of(run, "generated") if line["purpose"] == "train"]
    assert generated == [16, 16]
    samples, template = scenes()[:16], template_of()
    prompts = [template.expand(template.prompt_token_ids(s), template.image_features(s)) for s in samples]
    assert sum(map(len, prompts)) > 512 > max(map(len, prompts)) + MAX_NEW_TOKENS


@pytest.mark.wide
def test_adapters_arrive_merged_in_the_engine(tmp_path):
    """After one long step the engine answers as the model that the checkpoint holds."""
    out = run_of("lora", tmp_path)
    answers = {
        step: [scene["response_text"] for scene in evaluation["scenes"]]
        for step in (0, 1)
        for evaluation in [json.loads((out / f"evaluations/step-{step:06d}.json").read_text())]
    }
    base = load_model()
    assert answers[0] == greedy(base)
    assert answers[1] == greedy(PeftModel.from_pretrained(base, out / "checkpoint-1").eval())
    assert sum(before != after for before, after in zip(answers[0], answers[1], strict=True)) > 4


def greedy(model):
    with torch.no_grad():
        rollouts = HfBackend(model, template_of(), batch_size=NUM_SCENES).generate(
            requests_for(scenes()[:NUM_SCENES]), Decoding(max_new_tokens=MAX_NEW_TOKENS)
        )
    vocabulary = template_of().vocabulary
    return [vocabulary.text(rollout.response_token_ids) for rollout in rollouts]
