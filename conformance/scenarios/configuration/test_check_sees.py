"""``rollmatch check`` refuses what would end a run later: weights, attention, adapters, rewards, lengths, disks."""

import json
import shutil
from collections import namedtuple

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from conformance.doubles import wrong_rewards
from conformance.doubles.digits import ROOT
from rollmatch.cli.main import main

GRPO = """
model: {model: m}
global_max_length: 64
custom:
  trainer_variant: grpo
  train_jsonl: train.jsonl
  extra:
    grpo: {rewards: [{function: "my_rewards_51:right"}], num_generations: 2}
    rollout_matching: {max_new_tokens: 8, rollout_backend: hf, decoding: {temperature: 1.0}}
training: {output_dir: out, max_steps: 2, per_device_train_batch_size: 2, report_to: none}
"""
SERVED = (
    *("custom.extra.rollout_matching.overlap=ahead", "custom.extra.rollout_matching.rollout_backend=vllm"),
    *("custom.extra.rollout_matching.vllm.mode=server", "custom.extra.rollout_matching.vllm.server.group_port=51216"),
    "custom.extra.rollout_matching.vllm.server.base_url=http://127.0.0.1:8000",
)


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(ROOT / "fixtures/models/arithmetic", "m")
    shutil.copy(wrong_rewards.__file__, tmp_path / "my_rewards_51.py")
    (tmp_path / "run.yaml").write_text(GRPO)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "metadata": {"answer": "2"}}) + "\n")
    return tmp_path


def check(capsys, *overrides):
    code = main(["check", "run.yaml", *(word for override in overrides for word in ("--set", override))])
    return code, capsys.readouterr()


def refusal(capsys, *overrides):
    code, printed = check(capsys, *overrides)
    assert code == 1
    assert "Traceback" not in printed.err
    return printed.err


def of(*names):
    functions = ", ".join(f"{{function: 'my_rewards_51:{name}'}}" for name in names)
    return f"custom.extra.grpo.rewards=[{functions}]"


@pytest.mark.scenario(clauses=["configuration/check-refuses-what-must-fail#2"])
def test_a_reward_that_does_not_fit_the_data_is_called_and_refused(task, capsys):
    names = ("needs_column", "needs_key", "forgets", "one_for_all", "one_for_two", "says", "right")
    said = refusal(capsys, of(*names))
    assert "rollmatch: 6 problems" in said
    assert said.count("[reward-fails]") == 6
    for part in (
        "missing 1 required positional argument: 'solution'",
        "needs_key on train.jsonl:1 raised KeyError: 'solution'",
        "forgets on train.jsonl:1 returned None",
        "one_for_all on train.jsonl:1 returned a float for 2 completions",
        "one_for_two on train.jsonl:1 returned 1 values for 2 completions",
        "says on train.jsonl:1 returned 'good'",
    ):
        assert part in said
    assert "the metadata of this sample has answer" in said


@pytest.mark.scenario(clauses=["prefetch/values-are-sampled-before-weights-change#5"])
def test_a_reward_that_needs_the_main_thread_is_refused_where_values_are_made_in_another(task, capsys):
    ahead = ["custom.trainer_variant=vineppo", "training.packing=false", *SERVED]
    said = refusal(capsys, *ahead, of("right", "limits_time"))
    assert "1 problem\n" in said
    assert "[reward-fails] custom.extra.grpo.rewards: limits_time works in the main thread alone: ValueError" in said
    assert "Set its processes to 1" in said
    workers = "custom.extra.grpo.rewards=[{function: 'my_rewards_51:limits_time', processes: 1}]"
    assert check(capsys, *ahead, workers)[0] == 0
    assert check(capsys, *ahead, "custom.extra.rollout_matching.overlap=off", of("limits_time"))[0] == 0


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.csv", "question,answer\n1 + 1?,2\n", "csv"),
        ("a.json", '[\n{"question": "1 + 1?", "answer": "2"}\n]\n', "json"),
    ],
)
def test_a_file_of_another_format_is_read_by_what_the_remedy_says(task, capsys, name, text, kind):
    (task / name).write_text(text)
    assert main(["check", "run.yaml", "--set", f"custom.train_jsonl={name}"]) == 1
    printed = capsys.readouterr().err
    assert "1 problem\n" in printed
    assert f"custom.dataset: {{source: {kind}, train: {name}, val: FILE, columns: {{prompt: COLUMN}}}}" in printed
    said = f"{{source: {kind}, train: {name}, val: null, columns: {{prompt: question}}}}"
    assert main(["check", "run.yaml", "--set", "custom.train_jsonl=null", "--set", f"custom.dataset={said}"]) == 0


def test_an_evaluation_of_what_is_learnt_from_is_a_warning(task, capsys):
    assert main(["check", "run.yaml", "--set", "custom.val_jsonl=train.jsonl"]) == 0
    assert "train.jsonl is learnt from and evaluated" in capsys.readouterr().out


def test_a_reward_that_an_answer_may_have_failed_is_a_warning(task, capsys):
    code, printed = check(capsys, of("counts", "divides", "right"))
    assert code == 0
    assert printed.out.splitlines()[-3:] == [
        "warning: counts on train.jsonl:1 raised ValueError: no number in 2",
        "warning: divides on train.jsonl:1 returned nan",
        "ok; warnings: 2",
    ]


@pytest.mark.scenario(
    "configuration/weights-that-are-cut-off", clauses=["configuration/check-refuses-what-must-fail#1"]
)
def test_weights_that_are_missing_or_cut_off_are_refused(task, capsys):
    path = task / "m/model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:10_000])
    assert f"[weights-damaged] model.model: m/model.safetensors has 10000 bytes instead of {len(whole)}" in refusal(
        capsys
    )
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    assert "[weights-damaged]" in refusal(capsys)
    path.unlink()
    assert "[weights-missing] model.model: m holds no weights" in refusal(capsys)
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (task / "m/model.safetensors.index.json").write_text(json.dumps(index))
    (task / "m/model-1-of-2.safetensors").write_bytes(whole)
    said = refusal(capsys)
    assert "rollmatch: 1 problem" in said
    assert "[weights-missing] model.model: m/model-2-of-2.safetensors is missing" in said


@pytest.mark.parametrize(("free", "fits"), [(12_300_000, True), (12_200_000, False)])
def test_a_disk_without_room_for_a_checkpoint_is_refused(task, capsys, monkeypatch, free, fits):
    """1,021,632 weights in float32 and two states of each: 12.26 MB."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - free, free))
    code, printed = check(capsys)
    assert (code == 0) == fits
    assert ("[disk-too-small] training.output_dir: a checkpoint needs 12.3MB, " in printed.err) != fits


def test_answers_that_do_not_fit_are_refused_with_the_length_that_does(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = main(["check", "fixtures/digits/digits.yaml", "--set", "custom.extra.rollout_matching.max_new_tokens=20"])
    said = capsys.readouterr().err
    assert code == 1
    assert (
        "[answers-too-long] custom.extra.rollout_matching.max_new_tokens: is 20, and half of the true answers" in said
    )


ON_MLP = {"target_modules": ["up_proj"]}


@pytest.mark.parametrize(
    ("base", "adapter", "said"),
    [
        ({}, ON_MLP, ""),
        ({}, ON_MLP | {"use_dora": True, "modules_to_save": ["lm_head"], "ensure_weight_tying": True}, ""),
        ({"hidden_size": 64}, ON_MLP, "layers.0.mlp.up_proj.lora_A.weight is [8, 64] in its file, and [8, "),
        ({"num_hidden_layers": 9}, ON_MLP, "up_proj.lora_A.weight is [8, "),
        ({"num_hidden_layers": 1}, ON_MLP, "up_proj.lora_A.weight is missing in its file, and [8, "),
        ({"model_type": "gpt2"}, {"target_modules": ["c_attn"]}, "not found in the base model"),
    ],
    ids=["own", "own-dora", "other-width", "more-layers", "fewer-layers", "other-modules"],
)
def test_an_adapter_of_another_model_does_not_fit(task, capsys, base, adapter, said):
    described = json.loads((task / "m/config.json").read_text())
    described = base if "model_type" in base else described | base | {"layer_types": None}
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described))
    other.name_or_path = "who/trained"
    get_peft_model(other, LoraConfig(**adapter)).save_pretrained(task / "adapter")
    overrides = ("--set", "model.adapter=adapter", "--set", "tuner.train_type=lora")
    code = main(["check", "run.yaml", *overrides])
    error = capsys.readouterr().err
    assert code == bool(said), error
    assert said in error
    assert not said or "[adapter-unfit] model.adapter: adapter does not fit the model" in error
    assert not said or "Name the model that it was trained on: who/trained." in error
