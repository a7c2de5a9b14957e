"""What an export keeps of the training, and whether it gives the answers that were evaluated."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from conformance.doubles.trained_run import train
from rollmatch.cli.main import main

SLOW = ("training.bf16=true", "training.learning_rate=1e-5", "training.optim=adamw_torch", "training.warmup_steps=0")
LORA = ("tuner.train_type=lora", "tuner.lora_rank=4", "training.learning_rate=1e-3", "training.bf16=true")
MORE = ("training.eval_scenes=12", "custom.extra.rollout_matching.max_new_tokens=24")


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    return folder, train(folder, *SLOW, *MORE, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    return folder, train(folder, *LORA, *MORE, dtype=torch.bfloat16)


def exported(run, out, *options):
    assert main(["export", str(run), str(out), *options]) == 0
    return load_file(out / "model.safetensors")


def changes(before, after):
    """Changed weights, and all."""
    pairs = [(before[name].to(after[name].dtype), after[name]) for name in before]
    return sum(int((old != new).sum()) for old, new in pairs), sum(new.numel() for _, new in pairs)


@pytest.mark.scenario(clauses=["observability/an-export-says-what-it-keeps#1"])
def test_the_share_of_changes_that_rounding_loses_is_said(full, capsys):
    folder, run = full
    before = load_file(folder / "model/model.safetensors")
    (trained, num), (half, _), (whole, _) = (
        changes(before, after)
        for after in (
            load_file(run / "checkpoint-2/model.safetensors"),
            exported(run, folder / "half"),
            exported(run, folder / "whole", "--dtype", "float32"),
        )
    )
    assert trained == whole > 0.5 * num
    assert half < 0.2 * trained
    said = f"{trained / num:.1%} of the weights changed, bfloat16 keeps {half / trained:.1%} of these changes"
    assert said in capsys.readouterr().out
    assert said in (folder / "half/README.md").read_text()
    assert "keeps" not in (folder / "whole/README.md").read_text()
    assert "It was evaluated under autocast to bfloat16" in (folder / "whole/README.md").read_text()


@pytest.mark.scenario(clauses=["observability/an-export-says-what-it-keeps#3"])
def test_an_adapter_on_a_base_in_half_precision_is_merged_wide_and_rounded_once(tmp_path, capsys):
    """As peft merges it for half precision; in float32 every change is kept."""
    run = train(tmp_path, *LORA, "model.torch_dtype=bfloat16", dtype=torch.bfloat16)
    before = load_file(tmp_path / "model/model.safetensors")
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    by_peft = PeftModel.from_pretrained(base, run / "checkpoint-2").merge_and_unload().state_dict()
    half, whole = exported(run, tmp_path / "half"), exported(run, tmp_path / "whole", "--dtype", "float32")
    assert all(torch.equal(half[name], by_peft[name]) for name in half)
    (kept, num), (changed, _) = changes(before, half), changes(before, whole)
    assert 0 < kept < changed
    said = f"{changed / num:.1%} of the weights changed, bfloat16 keeps {kept / changed:.1%} of these changes"
    assert said in capsys.readouterr().out
    card = (tmp_path / "half/README.md").read_text()
    assert said in card
    assert "Merging rounds: answers near a tie may differ" in card
    check_a_second_adapter(tmp_path, run / "checkpoint-2")


def check_a_second_adapter(folder, first):
    """What was rounded before it was trained on stays so: a base stored in float32, and an adapter merged into it."""
    half = ("model.torch_dtype=bfloat16", f"model.model={folder / 'whole'}", f"model.adapter={first}")
    run = train(folder / "second", *LORA, *half)
    base = AutoModelForImageTextToText.from_pretrained(folder / "whole", dtype=torch.bfloat16)
    trained_on = PeftModel.from_pretrained(base, first).merge_and_unload().float()
    by_peft = PeftModel.from_pretrained(trained_on, run / "checkpoint-2").merge_and_unload().state_dict()
    found = exported(run, folder / "both")
    assert all(torch.allclose(found[name], by_peft[name], rtol=0, atol=1e-6) for name in found)


@pytest.mark.scenario(clauses=["observability/an-export-says-what-it-keeps#2"])
def test_a_whole_export_gives_the_evaluated_answers_and_another_one_says_how_many_differ(full, capsys):
    folder, run = full
    assert main(["export", str(run), str(folder / "equal"), "--dtype", "float32", "--verify"]) == 0
    assert "12 of 12 answers equal those of step 2" in capsys.readouterr().out
    weights = load_file(folder / "equal/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.scenario("observability/an-adapter-alone", clauses=["observability/an-export-says-what-it-keeps#2"])
def test_an_adapter_alone_gives_the_evaluated_answers(lora, capsys):
    folder, run = lora
    out = folder / "adapter"
    assert main(["export", str(run), str(out), "--adapter", "--verify"]) == 0
    said = capsys.readouterr().out
    assert "adapter as trained on a base in float32" in said
    assert "12 of 12 answers equal those of step 2" in said
    assert (out / "adapter_model.safetensors").read_bytes() == (
        run / "checkpoint-2/adapter_model.safetensors"
    ).read_bytes()
    assert not (out / "config.json").exists()
    assert AutoModelForImageTextToText.from_pretrained(out).peft_config


def test_another_model_s_answers_differ(full, tmp_path, capsys):
    """Weights of another step under the name of this one."""
    folder, run = full
    checkpoint = tmp_path / "run/checkpoint-2"
    checkpoint.parent.mkdir()
    for name in ("resolved.yaml", "journal.jsonl", "evaluations"):
        (tmp_path / "run" / name).symlink_to(run / name)
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1)
    model.save_pretrained(checkpoint)
    assert (
        main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--checkpoint", str(checkpoint), "--verify"]) == 1
    )
    error = capsys.readouterr().err
    assert "[export-differs]" in error
    assert "0 of 12 answers equal those of step 2, which were computed in float32 weights, bfloat16 autocast" in error


def test_what_cannot_be_verified_or_has_no_adapter_is_refused(full, tmp_path, capsys):
    _, run = full
    assert main(["export", str(run), str(tmp_path / "out"), "--adapter"]) == 1
    assert "[no-adapter] --adapter" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run/resolved.yaml").write_text((run / "resolved.yaml").read_text())
    checkpoint = ("--checkpoint", str(run / "checkpoint-2"))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), *checkpoint, "--verify"]) == 1
    assert "[nothing-to-verify] --verify" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
