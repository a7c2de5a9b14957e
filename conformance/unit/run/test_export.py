"""An exported run is a model directory: transformers and vLLM load it, and it answers as the trained policy does."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from conformance.doubles.checkpoints import check_vllm_writes_as_transformers_does
from conformance.doubles.trained_run import FULL, train
from rollmatch.cli.main import main
from rollmatch.model.checkpoint import merged_weights
from rollmatch.run.directory import JOURNAL, RESOLVED, last_checkpoint

LORA = (
    *("tuner.train_type=lora", "tuner.use_dora=true", "tuner.lora_rank=4", "training.learning_rate=1e-2"),
    r"tuner.target_regex=.*layers\.0\..*(q_proj|down_proj)",
)


@pytest.fixture(scope="module", params=[LORA, FULL], ids=["dora", "full"])
def exported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    run = train(folder, *request.param)
    assert main(["export", str(run), str(folder / "out")]) == 0
    return folder


def test_files_of_training_are_not_copied(tmp_path):
    from rollmatch.run.export import copy_described

    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "out").mkdir()
    training = ("manifest.json", "trainer_state.json", "packer-rank0.json", "optimizer.pt", "learner.json")
    for name in (*training, "config.json", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / "checkpoint" / name).write_text("{}")
    copy_described(tmp_path / "checkpoint", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "tokenizer.json", "chat_template.jinja"
    }  # fmt: skip


def test_the_processor_has_the_settings_of_the_run(tmp_path):
    from rollmatch.run.export import copy_described, write_processor

    base, size = "fixtures/models/digits", {"shortest_edge": 1024, "longest_edge": 20480}
    copy_described(Path(base), tmp_path)
    write_processor(Path(base), tmp_path, {"size": size})
    image = Image.new("RGB", (1280, 960))
    wanted, found, before = (
        AutoProcessor.from_pretrained(path, **settings).image_processor([image], return_tensors="pt")["image_grid_thw"]
        for path, settings in ((base, {"size": size}), (tmp_path, {}), (base, {}))
    )
    assert torch.equal(wanted, found)
    assert not torch.equal(wanted, before)


def test_a_card_names_the_model_and_what_the_first_run_began_with(tmp_path):
    from rollmatch.run.export import card

    stages = {"one": ("Qwen/Qwen3-VL-2B-Instruct", "sft"), "two": (str(tmp_path / "one/checkpoint-20"), "grpo")}
    for name, (model, variant) in stages.items():
        (tmp_path / name).mkdir()
        described = f"model: {{model: {model}}}\ncustom: {{trainer_variant: {variant}}}\n"
        (tmp_path / name / RESOLVED).write_text(described)
    (tmp_path / "two" / JOURNAL).write_text("")
    lines = card("cats", tmp_path / "two", "full fine-tuning").splitlines()
    assert lines[2] == "base_model: Qwen/Qwen3-VL-2B-Instruct"
    assert "# cats" in lines
    assert "`Qwen/Qwen3-VL-2B-Instruct`, trained with rollmatch: `sft`, then `grpo`; full fine-tuning." in lines


@pytest.mark.parametrize("system", ["Answer briefly.", None])
def test_a_card_shows_the_prompt_and_the_first_and_last_evaluation(tmp_path, system):
    from rollmatch.run.export import card

    prompts = {"system": system, "user": "List all."}
    custom = {"trainer_variant": "sft", "prompts": prompts}
    custom["extra"] = {"rollout_matching": {"answer_format": "json"}}
    run = tmp_path / "run"
    (tmp_path / "model").mkdir()
    run.mkdir()
    (run / RESOLVED).write_text(json.dumps({"model": {"model": str(tmp_path / "model")}, "custom": custom}))
    events = [
        {"f1": 0.123456, "seconds": 1, "a/b": 1},
        {"f1": 0.2},
        {"f1": 0.5, "ap": 2 / 3, "tokens_per_s": 7, "a/b": 2},
    ]
    lines = [{"event": "run"}, *({"event": "evaluated", "metrics": metrics} for metrics in events)]
    (run / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["* System: Answer briefly."] if system else []
    assert card("cats", run, "made").splitlines() == [
        *("---", "library_name: transformers", "tags: [rollmatch]", "---", "", "# cats", ""),
        *("`model`, trained with rollmatch: `sft`; made.", ""),
        *("Trained with this prompt:", "", *asked, "* User, after the image: List all.", ""),
        *("Answers have the form `json`.", ""),
        *("| held-out metric | before | last |", "|---|---|---|", "| f1 | 0.1235 | 0.5 |", "| ap | - | 0.6667 |"),
    ]


@pytest.mark.parametrize(
    ("described", "dtype", "written"),
    [
        ({"dtype": "bfloat16"}, "bfloat16", {"dtype": "float16"}),
        ({"torch_dtype": "float16", "text_config": {"dtype": "x"}}, "float16", {"torch_dtype": "float16"}),
        ({"dtype": "int8", "text_config": {"torch_dtype": "bfloat16"}}, "bfloat16", {"dtype": "float16"}),
        ({"vision_config": None, "text": {"dtype": "bfloat16"}}, "float32", {}),
    ],
)
def test_the_dtype_is_read_and_written_where_a_model_says_it(tmp_path, described, dtype, written):
    from rollmatch.model.source import dtype_of
    from rollmatch.run.export import _write_config

    (tmp_path / "config.json").write_text(json.dumps(described))
    assert dtype_of(tmp_path) == dtype
    _write_config(tmp_path, "float16")
    parts = {
        name: dict.fromkeys(part, "float16") if name == "text_config" else part for name, part in described.items()
    }
    assert json.loads((tmp_path / "config.json").read_text()) == parts | written


def test_transformers_loads_it_with_the_weights_that_servers_get(exported):
    from rollmatch.config import load_config
    from rollmatch.run.export import load_trained

    run, out = exported / "run", exported / "out"
    trained = dict(merged_weights(load_trained(load_config(str(run / RESOLVED)), last_checkpoint(run))))
    loaded = AutoModelForImageTextToText.from_pretrained(out, dtype="auto")
    found = dict(merged_weights(loaded))
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    before = dict(merged_weights(AutoModelForImageTextToText.from_pretrained(exported / "model", dtype="auto")))
    assert any(not torch.equal(found[name], tensor) for name, tensor in before.items())
    AutoProcessor.from_pretrained(out)
    card = (out / "README.md").read_text()
    assert "| f1 |" in card
    assert "| seconds |" not in card
    prompts = load_config(str(run / RESOLVED)).custom.prompts
    assert f"* System: {prompts.system}\n* User, after the image: {prompts.user}\n" in card
    assert "Answers have the form `coord_tokens`." in card
    assert "# out\n\n`model`, trained with rollmatch: `rollout_matching_sft`; " in card
    assert "checkpoint-2" in card
    assert "base_model" not in card


def test_another_dtype_is_written_everywhere(exported, tmp_path):
    assert main(["export", str(exported / "run"), str(tmp_path / "new" / "half"), "--dtype", "bfloat16"]) == 0
    written = load_file(tmp_path / "new" / "half" / "model.safetensors")
    assert {weight.dtype for weight in written.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "new" / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_cannot_be_exported_is_named(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"

    def refused(*arguments):
        assert main(["export", str(run), str(out), *arguments]) == 1
        return capsys.readouterr().err

    assert "not-a-run" in refused()
    run.mkdir()
    (run / RESOLVED).touch()
    assert "checkpoint-missing" in refused()
    (run / "checkpoint-1").mkdir()
    out.mkdir()
    assert "output-exists" in refused("--checkpoint", str(run / "checkpoint-1"))


def test_a_foreign_file_in_a_checkpoint_is_named(exported, tmp_path, capsys):
    run = exported / "run"
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(last_checkpoint(run), checkpoint)
    (file,) = checkpoint.glob("*model.safetensors")
    file.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    for command in (["export", str(run), str(tmp_path / "out")], ["eval", str(run), "--limit", "1"]):
        assert main([*command, "--checkpoint", str(checkpoint)]) == 1
        assert "[checkpoint-unreadable] --checkpoint: a file of checkpoint-2" in capsys.readouterr().err


@pytest.mark.wide
@pytest.mark.engine
def test_vllm_answers_as_the_policy(exported):
    check_vllm_writes_as_transformers_does(exported / "out", [1, 2, 3, 4])
