"""``rollmatch train`` with its default backend, the real engine, from the first line to the page."""

import json

import pytest

from conformance.doubles.digits import scenes, template_of
from conformance.doubles.division import WEIGHT_FILES
from conformance.doubles.started import finish, journal_of, train_command

pytestmark = pytest.mark.engine

NUM_SCENES, MAX_NEW_TOKENS = 8, 48


VLLM = "custom.extra.rollout_matching.vllm"
SHORT_STEPS = (f"{VLLM}.max_model_len=512", f"{VLLM}.max_num_batched_tokens=512", f"{VLLM}.max_num_seqs=64")
TWO_STEPS = (
    *("training.max_steps=2", "training.per_device_train_batch_size=16", "training.save_steps=100"),
    *(*SHORT_STEPS, "custom.extra.rollout_matching.decoding.temperature=1"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run of two steps, all weights, rollouts sampled."""
    folder = tmp_path_factory.mktemp("colocate")
    own = (f"training.output_dir={folder / 'run'}", f"training.eval_scenes={NUM_SCENES}")
    words = (*own, f"custom.extra.rollout_matching.max_new_tokens={MAX_NEW_TOKENS}", *TWO_STEPS)
    code, output = finish(
        train_command(*words, "training.report_to=none", "training.learner_threads=1"), folder / "log"
    )
    assert code == 0, output
    assert "page:" in output
    return folder / "run"


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
