"""``rollmatch train --engine swift``: ms-swift's learner by the same YAML, its samples and its rewards."""

import json
import os
import runpy
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from conformance.doubles.digits import ROOT, absolute, scenes
from conformance.doubles.health_server import serving
from conformance.doubles.refusals import refused
from conformance.doubles.swift_parser import parse
from conformance.tools.outside_tools import python_of
from rollmatch.config import load_config
from rollmatch.interop.swift_cli import CONFIG_VARIABLE, LOSS_TYPES, learner_command, swift_rows, train_by_swift
from rollmatch.records import Sample
from rollmatch.run.server_checks import WaitPolicy

CONFIG = ROOT / "fixtures/digits/grpo-6v2.yaml"
GRPO = "custom.extra.grpo"
SUMMARY = f"model.model={ROOT}/fixtures/models/digits-summary"
MATCHING = ("custom.trainer_variant=rollout_matching_sft", "rlhf.use_vllm=false", "rlhf.vllm_mode=null")


def config_of(*overrides):
    return load_config(CONFIG, [*absolute(), SUMMARY, *overrides])


def understood(*overrides, gpus=("6", "7")):
    command = learner_command(config_of(*overrides), str(CONFIG), overrides=overrides, gpus=gpus)
    assert command.words[:2] == ("swift", "rlhf")
    return parse("rlhf", list(command.words[2:]))


def test_swift_learns_what_our_learner_would():
    parsed = understood("training.output_dir=/runs/one", f"{GRPO}.epsilon_high=0.28", f"{GRPO}.ratio_cap=3.0")
    assert (parsed["rlhf_type"], parsed["use_vllm"], parsed["vllm_mode"]) == ("grpo", True, "server")
    assert (parsed["vllm_server_host"], parsed["vllm_server_port"]) == (["127.0.0.1"], [8080])
    assert (parsed["vllm_server_group_port"], parsed["vllm_server_timeout"]) == ([51216], 240)
    assert (parsed["num_generations"], parsed["per_device_train_batch_size"]) == (8, 32), "it counts completions"
    assert (parsed["tuner_type"], parsed["use_dora"]) == ("lora", True)
    assert (parsed["lora_rank"], parsed["lora_alpha"]) == (16, 32)
    assert [parsed[f"freeze_{part}"] for part in ("llm", "vit", "aligner")] == [False, False, False]
    assert (parsed["epsilon"], parsed["epsilon_high"], parsed["delta"], parsed["beta"]) == (0.2, 0.28, 3.0, 0.02)
    assert (parsed["max_completion_length"], parsed["temperature"], parsed["top_k"]) == (64, 1.0, -1)
    assert (parsed["reward_funcs"], parsed["reward_weights"]) == (["form", "count", "content"], [0.3, 0.3, 0.4])
    assert (parsed["learning_rate"], parsed["adam_beta2"], parsed["max_steps"]) == (1e-3, 0.98, 36)
    assert parsed["dataset"] == ["/runs/one/swift-train.jsonl"]
    assert parsed["val_dataset"] == ["/runs/one/swift-val.jsonl"]
    assert (parsed["model_type"], parsed["template"]) == ("qwen3_vl", "qwen3_vl")
    kept = (parsed["kl_in_reward"], parsed["remove_unused_columns"], parsed["split_dataset_ratio"])
    assert kept == (False, False, 0), "rewards read all columns, and validation has samples of its own"


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("baseline=leave_one_out", "advantage_estimator", "rloo"),
        ("baseline=mean", "advantage_estimator", "grpo"),
        ("scale_rewards=none", "scale_rewards", "none"),
        ("mask_truncated_completions=true", "overlong_filter", True),
        ("normalize=constant", "loss_type", ["dr_grpo"]),
        ("normalize=sequence", "loss_type", ["grpo"]),
        ("correction_cap=5.0", "rollout_importance_sampling_threshold", 5.0),
        ("num_iterations=2", "num_iterations", 2),
        ("importance=sequence", "importance_sampling_level", "sequence"),
        ("top_entropy_share=0.2", "top_entropy_quantile", 0.2),
    ],
)
def test_every_variant_has_its_name_there(override, name, value):
    assert understood(f"{GRPO}.{override}")[name] == value


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("training.per_device_train_batch_size=3", "per_device_eval_batch_size", 3 * 8),
        *(
            (f"training.gradient_checkpointing={on}", "gradient_checkpointing", on != "false")
            for on in ("false", "auto")
        ),
        *(
            ("overlong=skip", "truncation_strategy", "delete"),
            ("overlong=truncate_left", "truncation_strategy", "left"),
        ),
        ("model.attn_impl=sdpa", "attn_impl", "sdpa"),
        ("custom.extra.rollout_matching.decoding.top_p=0.5", "top_p", 0.5),
        ("custom.extra.rollout_matching.repetition_penalty=1.5", "repetition_penalty", 1.5),
        *((f"training.{name}=3", name, 3) for name in ("save_steps", "gradient_accumulation_steps", "warmup_steps")),
        ("tuner.freeze_vit=true", "freeze_vit", True),
    ],
)
def test_every_number_and_switch_has_its_name_there(override, name, value):
    assert understood(override)[name] == value


@pytest.mark.parametrize(("gpus", "number"), [((), "1"), (("6",), "1"), (("6", "7"), "2")])
def test_a_process_is_started_per_gpu_and_one_without_any(gpus, number):
    environment = learner_command(config_of(), str(CONFIG), overrides=(), gpus=gpus).environment
    assert environment["NPROC_PER_NODE"] == number
    assert environment.get("CUDA_VISIBLE_DEVICES") == (",".join(gpus) or None)


def test_what_is_not_set_is_not_passed():
    parsed = understood(
        f"{GRPO}.correction_cap=null", "tuner={train_type: full, use_dora: false, lora_rank: 8, lora_alpha: 16}"
    )
    assert not parsed.keys() & {"rollout_importance_sampling_mode", "use_dora", "lora_rank", "delta", "attn_impl"}
    assert set(LOSS_TYPES) == {"token", "sequence", "constant"}
    accumulated = ("training.gradient_accumulation_steps=3", f"{GRPO}.steps_per_generation=2")
    assert understood(*accumulated)["steps_per_generation"] == 6, "it counts forward passes"


def test_float32_is_not_computed_in_float16():
    assert understood()["fp16"] is False
    assert "fp16" not in understood("training.bf16=true"), "ms-swift then computes in bfloat16"


def test_servers_of_the_other_section_are_named_by_url():
    vllm = "custom.extra.rollout_matching.vllm"
    parsed = understood(
        *MATCHING[1:],
        *("rlhf.vllm_server_host=null", "rlhf.vllm_server_port=null"),
        f"{vllm}.mode=server",
        f'{vllm}.server={{base_url: ["http://a:1/x", "http://b:2"], group_port: 7}}',
    )
    assert parsed["vllm_server_base_url"] == ["http://a:1/x", "http://b:2"]
    assert parsed["vllm_server_group_port"] == [7, 8]


def test_each_gpu_gets_a_process_that_knows_the_yaml():
    command = learner_command(config_of(), str(CONFIG), overrides=["training.seed=1"], gpus=["6", "7"])
    assert (command.environment["CUDA_VISIBLE_DEVICES"], command.environment["NPROC_PER_NODE"]) == ("6,7", "2")
    assert json.loads(command.environment[CONFIG_VARIABLE]) == [str(CONFIG), "training.seed=1"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (MATCHING, "custom.trainer_variant"),
        (("rlhf.vllm_mode=colocate",), "rlhf.vllm_mode"),
        (("training.packing=false", "training.tokens_per_micro_batch=4096"), "training.tokens_per_micro_batch"),
    ],
)
def test_what_swift_does_not_train_is_refused(override, key):
    with refused("swift-trains-otherwise", key):
        understood(*override)


def test_a_scene_becomes_a_chat_with_its_picture():
    sample = scenes()[0]
    [row] = swift_rows([sample], config_of())
    assert row["messages"] == [
        {"role": "system", "content": "Answer with one line."},
        {"role": "user", "content": "<image>How many digits are there, and which?"},
    ]
    assert (row["images"], row["origin"]) == (list(sample.images), sample.origin)


def test_a_chat_stays_what_it_is_but_for_tags():
    def row_of(*messages, images=()):
        sample = Sample(sample_id=0, origin="x:1", images=images, messages=messages)
        return [
            (message["role"], message["content"])
            for message in next(iter(swift_rows([sample], config_of())))["messages"]
        ]

    chat = (("system", "Be short."), ("user", "Is it red?"))
    assert row_of(*chat) == list(chat)
    assert row_of(*chat, images=("a.png", "b.png")) == [chat[0], ("user", "<image><image>Is it red?")]
    tagged = (("user", "Is <image> red?"),)
    assert row_of(*tagged, images=("a.png",)) == list(tagged)


def test_a_dry_run_prints_the_command_and_writes_nothing(tmp_path, capsys):
    overrides = [*absolute(), SUMMARY, f"training.output_dir={tmp_path}"]
    assert train_by_swift(str(CONFIG), overrides=overrides, gpus=["0"], wait=WaitPolicy(), dry_run=True) == 0
    assert " rlhf " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_samples_are_written_down_before_swift_begins(tmp_path):
    """By the command itself; the program ``swift`` prints its words."""
    program = tmp_path / "bin/swift"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    with serving(world_size=6) as url:
        own = (f"training.output_dir={tmp_path / 'run'}", f"rlhf.vllm_server_port=[{url.rpartition(':')[2]}]")
        words = [part for one in (*absolute(), SUMMARY, *own) for part in ("--set", one)]
        command = [sys.executable, "-m", "rollmatch", "train", str(CONFIG), "--engine", "swift", "--gpus", "0", *words]
        path = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    name, *written = json.loads(ended.stdout.splitlines()[-1])
    parsed = parse(name, written)
    for name, count in (("dataset", 768), ("val_dataset", 128)):
        with open(parsed[name][0]) as file:
            rows = [json.loads(line) for line in file]
        assert len(rows) == count
        assert all(os.path.isfile(image) for row in rows for image in row["images"])


@pytest.mark.parametrize(("steps", "strategy", "wanted"), [(0, "no", None), (5, "steps", 5)])
def test_evaluations_are_those_of_the_configuration(steps, strategy, wanted):
    config = config_of(f"training.eval_steps={steps}")
    parsed = parse("rlhf", list(learner_command(config, str(CONFIG), overrides=[], gpus=["0"]).words[2:]))
    assert (parsed["eval_strategy"], parsed.get("eval_steps")) == (strategy, wanted)


BY_SWIFT = """
import json, sys
from swift.arguments import RLHFArguments
from transformers import HfArgumentParser
known, unknown = HfArgumentParser([RLHFArguments]).parse_known_args(json.loads(sys.argv[1]))
import importlib.util
from swift.rewards import orms
for path in known.external_plugins:
    spec = importlib.util.spec_from_file_location("plugin", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
answers, origin = json.loads(sys.argv[2])
rewards = {name: orms[name](args=None)(answers, origin=origin, messages=None) for name in known.reward_funcs}
print("\\n" + json.dumps([unknown, known.vllm_server_port, rewards]))
"""


def test_rewards_are_registered_as_ms_swift_s(monkeypatch):
    orms, sample = {}, scenes()[0]
    monkeypatch.setitem(sys.modules, "swift", ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.rewards", SimpleNamespace(ORM=object, orms=orms))
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps([str(CONFIG), *absolute(), SUMMARY]))
    runpy.run_module("rollmatch.interop.swift_rewards")
    answers, origin = [f"1 digit: one {sample.objects[0].desc}", "nothing"], [sample.origin] * 2
    judged = {name: orm()(answers, origin=origin, messages=None) for name, orm in orms.items()}
    assert judged.keys() == {"form", "count", "content"}
    assert (judged["form"], judged["content"][1]) == ([1, 0], 0)


@pytest.mark.swift
def test_the_installed_swift_takes_the_line_and_our_rewards():
    overrides = [*absolute(), SUMMARY]
    command = learner_command(config_of(), str(CONFIG), overrides=overrides, gpus=["0"])
    sample = scenes()[0]
    names = [truth.desc for truth in sample.objects]
    answers = [f"1 digit: one {names[0]}", "nothing"]
    environment = os.environ | command.environment
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/impl:{ROOT}"}
    words = json.dumps(list(command.words[2:]))
    done = subprocess.run(
        [python_of("swift"), "-c", BY_SWIFT, words, json.dumps([answers, [sample.origin] * 2])],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    unknown, ports, rewards = json.loads(done.stdout.splitlines()[-1])
    assert (unknown, ports) == ([], [8080])
    assert rewards["form"] == [1, 0]
    assert rewards["count"] == [1 if len(names) == 1 else 1 - (len(names) - 1) / len(names), 0]
    assert rewards["content"][1] == 0 < rewards["content"][0] <= 1
