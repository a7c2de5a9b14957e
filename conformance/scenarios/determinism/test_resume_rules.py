"""What a resumed run may change, and that its first step learns."""

import json
import logging
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from conformance.doubles.digits import ROOT
from rollmatch.cli.main import main
from rollmatch.errors import ErrorList
from rollmatch.run.directory import check_unchanged

SMALL = (
    "custom.extra.rollout_matching.rollout_backend=hf",
    "custom.extra.rollout_matching.rollout_generate_batch_size=32",
    "custom.extra.grpo.num_generations=4",
    "training.per_device_train_batch_size=8",
    "training.learning_rate=1e-3",
    "training.warmup_steps=0",
    "training.max_steps=2",
    "training.save_steps=1",
    "training.save_total_limit=null",
    "training.eval_scenes=2",
    "training.report_to=none",
)


def run(out, *overrides, flags=()):
    files = (f"custom.{split}_jsonl={out.with_name(split)}.jsonl" for split in ("train", "val"))
    sets = [word for each in (*SMALL, *files, f"training.output_dir={out}", *overrides) for word in ("--set", each)]
    return main(["train", "fixtures/arithmetic/grpo.yaml", *sets, *flags])


def with_data(folder):
    for split in ("train", "val"):
        shutil.copy(ROOT / f"fixtures/arithmetic/{split}.jsonl", folder)
    return folder / "run"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    out = with_data(tmp_path_factory.mktemp("resumed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert run(out) == 0
    return out


def weights(out, step):
    return load_file(out / f"checkpoint-{step}/model.safetensors")


@pytest.mark.scenario(clauses=["determinism/a-resumed-run-changes-what-it-may#1"])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.learning_rate=1e-4", "training.learning_rate: was 0.001 when the run began and is 0.0001"),
        ("custom.extra.grpo.num_generations=8", "custom.extra.grpo.num_generations: was 4 when the run began and is 8"),
        ("tuner.train_type=lora", "tuner.train_type: was full when the run began and is lora"),
        ("training.seed=5", "training.seed: was 42 when the run began and is 5"),
    ],
)
def test_what_the_checkpoint_decides_is_refused(begun, capsys, monkeypatch, override, said):
    monkeypatch.chdir(ROOT)
    before = (begun / "journal.jsonl").read_bytes()
    assert run(begun, "training.max_steps=4", override, flags=("--resume",)) == 1
    error = capsys.readouterr().err
    assert "rollmatch: 1 problem" in error
    assert f"[resume-changed] {said}" in error
    assert f"start a new run with model.model: {begun}/checkpoint-2" in error
    assert (begun / "journal.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern", "trainable_token_indices"])
@pytest.mark.parametrize("now", [{"q_proj": 2}, {"q_proj": 1, "k_proj": 1}, {}])
def test_what_is_said_of_single_modules_is_refused_too(name, now, tmp_path):
    (tmp_path / "resolved.yaml").write_text(f"tuner: {{{name}: {{q_proj: 1}}, lora_rank: 8}}")
    check_unchanged(tmp_path / "checkpoint-2", f"tuner: {{{name}: {{q_proj: 1}}, lora_rank: 8}}")
    with pytest.raises(ErrorList) as caught:
        check_unchanged(tmp_path / "checkpoint-2", f"tuner: {{{name}: {json.dumps(now)}, lora_rank: 8}}")
    assert [(error.code, error.key) for error in caught.value.errors] == [("resume-changed", f"tuner.{name}")]


@pytest.mark.scenario(
    "determinism/a-run-of-two-steps-goes-on-to-four", clauses=["determinism/a-resumed-run-changes-what-it-may#2,3"]
)
def test_more_steps_are_shown_and_the_first_of_them_learns(begun, capsys, caplog, monkeypatch):
    """The schedule of two steps has ended at 0, where that of four steps is at half. The output head is tied."""
    monkeypatch.chdir(ROOT)
    logging.getLogger("transformers.trainer").addHandler(caplog.handler)
    assert run(begun, "training.max_steps=4", flags=("--resume",)) == 0
    assert "missing keys" not in caplog.text
    printed = capsys.readouterr().out
    changed = [line for line in printed.splitlines() if "changed since the run began" in line]
    assert changed == ["  changed since the run began: training.max_steps: 2 -> 4"], "as many samples as before"
    assert re.search(r"^  language model: (\d+) of \1 tensors are trained$", printed, re.MULTILINE)
    assert re.findall(r"^step (\S+)", printed, re.MULTILINE) == ["3/4", "4/4"]
    assert "starting the engine" not in printed, "the run has none"
    assert "'loss'" not in printed, "steps are reported by the run alone"
    table, page = printed.index("validation"), printed.index(f"page: {begun}/run.html")
    assert table < printed.index("Reward", table) < page
    assert "learning rate 0" not in printed
    before, after = weights(begun, 2), weights(begun, 3)
    moved = max((before[name] - after[name]).abs().max().item() for name in before)
    assert moved == pytest.approx(0.5e-3, rel=0.6), "Adam moves a weight by about the rate"
    assert any(not torch.equal(before[name], after[name]) for name in before)

    rows = begun.with_name("train.jsonl").read_text().splitlines(keepends=True)
    begun.with_name("train.jsonl").write_text("".join([*rows[1:], rows[0]]))
    assert run(begun, "training.max_steps=5", "training.max_grad_norm=0.5", flags=("--resume",)) == 0
    changed = [line for line in capsys.readouterr().out.splitlines() if "changed since the run began" in line]
    assert changed == [
        "  changed since the run began: training.max_steps: 4 -> 5",
        "  changed since the run began: training.max_grad_norm: 1.0 -> 0.5",
        "  changed since the run began: training samples: as many, with other content",
    ]


def test_a_step_at_rate_0_and_a_resume_of_nothing_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run(with_data(tmp_path), "training.max_steps=1", "training.warmup_steps=5", flags=("--resume",)) == 0
    printed = capsys.readouterr().out
    assert f"nothing to resume: {tmp_path}/run holds no checkpoint; the run begins at step 0" in printed
    assert len(re.findall("warning: step 1 has learning rate 0 and changes nothing: the warm-up", printed)) == 1
