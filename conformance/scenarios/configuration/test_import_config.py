"""Configurations of TRL and ms-swift become ours, and what has no counterpart is listed."""

import argparse
import json
import math
import shlex
from typing import get_args

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.digits import ROOT
from conformance.doubles.refusals import refused
from rollmatch.cli.main import main
from rollmatch.config import load_config
from rollmatch.config.layers import holds
from rollmatch.config.yaml_dialect import parse_mapping
from rollmatch.errors import ConfigError, ErrorList
from rollmatch.interop.import_config import GRPO, MATCHING, SERVER, convert, import_config, read_source

TRL = {
    "model_name_or_path": str(ROOT / "fixtures/models/arithmetic"),
    "reward_funcs": ["think_format_reward", "fixtures.arithmetic.rewards.right"],
    "reward_weights": [0.2, 0.8],
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "loss_type": "dr_grpo",
    "scale_rewards": False,
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_server_port": 8090,
    "use_peft": True,
    "lora_r": 32,
    "lora_target_modules": ["q_proj", "v_proj"],
    "output_dir": "runs/x",
    "push_to_hub": True,
}
SWIFT = (
    "swift rlhf --rlhf_type grpo --model M --dataset d.jsonl --reward_funcs my.rewards.right --use_vllm true "
    "--vllm_mode server --vllm_server_host 10.0.0.1 10.0.0.2 --vllm_server_port 8000 8001 --train_type lora "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 4 --deepspeed zero2 --output_dir o"
)


@pytest.mark.scenario(
    "configuration/a-grpo-configuration-of-trl-becomes-ours",
    clauses=["configuration/configurations-of-other-trainers-can-be-imported#1"],
)
def test_a_configuration_of_trl_loads_as_ours(tmp_path, capsys):
    source, out = tmp_path / "trl.yaml", tmp_path / "ours.yaml"
    source.write_text(yaml.safe_dump(TRL))
    assert main(["import-config", str(source), "--out", str(out)]) == 0
    assert "# left out: push_to_hub: use rollmatch export --push" in out.read_text()
    data = str(ROOT / "fixtures/arithmetic/train.jsonl")
    needed = [f"custom.{name}_jsonl={data}" for name in ("train", "val")]
    config = load_config(str(out), needed)
    grpo, training = config.custom.extra.grpo, config.training
    assert [(one.function, one.weight) for one in grpo.rewards] == [
        ("trl.rewards:think_format_reward", 0.2),
        ("fixtures.arithmetic.rewards:right", 0.8),
    ]
    assert (grpo.normalize, grpo.scale_rewards) == ("constant", "none")
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (training.learning_rate, config.tuner.lora_rank, config.tuner.train_type) == (1e-6, 32, "lora")
    assert (config.tuner.lora_alpha, config.tuner.lora_dropout) == (32, 0.05), "TRL's defaults"
    assert config.custom.extra.rollout_matching.vllm.server.base_url == "http://127.0.0.1:8090"


def test_a_command_line_of_ms_swift_names_its_servers():
    made = convert(*read_source(shlex.split(SWIFT)))
    assert made.keys[f"{SERVER}.base_url"] == ["http://10.0.0.1:8000", "http://10.0.0.2:8001"]
    assert made.keys[f"{SERVER}.group_port"] == [51216, 51217]
    assert made.keys["custom.train_jsonl"] == "d.jsonl"
    assert made.keys[f"{GRPO}.rewards"] == [{"function": "my.rewards:right", "weight": 1.0}]
    assert made.keys[f"{MATCHING}.decoding.temperature"] == 0.9
    assert made.keys["training.strategy"] == "deepspeed_zero2"
    assert made.left_out == {}


def test_a_command_line_of_documentation_is_read():
    """Values that YAML cannot read are texts: what documentation leaves out, and its marks."""
    _, fields = read_source(shlex.split("swift rlhf --rlhf_type grpo --model M --beta 0.5 --dataset ... ```"))
    assert fields["dataset"] == ["...", "```"]
    assert fields["beta"] == 0.5


@pytest.mark.parametrize(
    ("value", "strategy"), [("zero3", "deepspeed_zero3"), ("ds.json", "ds.json"), ("zero3_offload", None)]
)
def test_a_deepspeed_setting_becomes_a_strategy_or_is_left_out(value, strategy):
    made = convert("swift", {"deepspeed": value, "per_device_train_batch_size": 8})
    assert made.keys.get("training.strategy") == strategy
    assert ("deepspeed" in made.left_out) == (strategy is None)


def test_a_command_line_of_ms_swift_passes_check_and_its_rewards_fit(tmp_path, capsys):
    rows = [
        {"messages": [{"role": "user", "content": f"{i} + 1 ="}], "metadata": {"solution": str(i + 1)}}
        for i in range(4)
    ]
    data, out = tmp_path / "rows.jsonl", tmp_path / "ours.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = (
        f"swift rlhf --rlhf_type grpo --model {ROOT}/fixtures/models/arithmetic --dataset {data} --val_dataset {data} "
        f"--reward_funcs {__name__}.is_solution --use_vllm true --vllm_mode colocate --train_type full "
        "--num_generations 4 --per_device_train_batch_size 4 --max_completion_length 8 --max_length 64 --bf16 false "
        f"--output_dir {tmp_path}/o"
    )
    assert main(["import-config", "--out", str(out), "--", *shlex.split(line)]) == 0
    assert main(["check", str(out)]) == 0, capsys.readouterr()


def is_solution(completions, solution, **columns):
    """A reward as ms-swift's and TRL's users write them, by a column of the data set."""
    return [float(text == right) for text, right in zip(completions, solution, strict=True)]


SHOWN_OTHERWISE = (
    *("logging_steps", "report_to", "optim", "gradient_checkpointing", "dtype", "template"),
    *("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_group_port", "vllm_server_host"),
    *(
        "vllm_server_port",
        "vllm_server_group_port",
        "vllm_max_num_seqs",
        "sleep_level",
        "target_modules",
        "lora_target_modules",
    ),
    *("use_vllm", "ddp_timeout", "vllm_enforce_eager", "model_revision"),
    *("dataset_train_split", "dataset_test_split", "lora_r", "lora_rank", "lora_alpha", "lora_dropout"),
)
"""Fields whose defaults change neither what is learnt nor what is kept, or count with other fields only."""


@pytest.mark.parametrize(
    ("kind", "file", "section"), [("trl", "trl/arguments", None), ("swift", "swift/options", "rlhf_defaults")]
)
def test_a_default_of_the_source_that_is_written_out_changes_nothing(kind, file, section):
    recorded = json.loads((ROOT / f"fixtures/{file}.json").read_text())
    fields = recorded[section] if section else recorded
    plain, config = convert(kind, {}).keys, load_config(str(ROOT / "fixtures/arithmetic/grpo.yaml"))
    wrong = {}
    for name, default in fields.items():
        if default is None or name in SHOWN_OTHERWISE:
            continue
        keys = convert(kind, {name: default}).keys
        for key in keys.keys() - plain.keys():
            ours = value_of(type(config), key)
            if ours != keys[key] and (ours or keys[key]):
                wrong[name] = (keys[key], ours)
        changed = {key: (keys.get(key), plain[key]) for key in plain if keys.get(key) != plain[key]}
        if changed:
            wrong[name] = changed
    assert wrong == {}


def value_of(kind, key):
    """Our default of a dotted key."""
    name, _, rest = key.partition(".")
    if kind is dict or name not in kind.model_fields:
        return None
    annotation = kind.model_fields[name].annotation
    inner = next((one for one in (annotation, *get_args(annotation)) if hasattr(one, "model_fields")), dict)
    return value_of(inner, rest) if rest else kind.model_fields[name].default


def test_a_command_line_of_ms_swift_has_ms_swift_s_defaults():
    made = convert(*read_source(["swift", "rlhf", "--rlhf_type", "grpo", "--model", "M"]))
    expected = {
        f"{GRPO}.beta": 0.04, f"{GRPO}.normalize": "sequence", f"{GRPO}.correction_cap": None,
        "tuner.train_type": "lora", "tuner.lora_rank": 8, "tuner.lora_alpha": 32, "tuner.lora_dropout": 0.05,
        "tuner.freeze_vit": True, "training.weight_decay": 0.1,
        "training.lr_scheduler_type": "cosine", "training.num_train_epochs": 3.0,
        "training.per_device_train_batch_size": 1, "training.gradient_accumulation_steps": 2, "global_max_length": 1024,
    }  # fmt: skip
    assert {key: made.keys[key] for key in expected} == expected


def test_what_differs_in_substance_is_listed_with_its_reason():
    fields = {
        "importance_sampling_level": "sequence_token",
        "min_p": 0.1,
        "push_to_hub": False,
        "log_completions": True,
    }
    made = convert(
        "trl", fields | {"dataset_name": "trl-lib/x", "attn_implementation": "kernels-community/flash-attn2"}
    )
    assert made.left_out.keys() == {
        *("importance_sampling_level", "min_p", "attn_implementation"),
    }
    assert made.left_out["importance_sampling_level"] == "sequence_token has no counterpart; token and sequence have"
    assert made.keys["custom.dataset.source"] == "trl-lib/x"
    assert "custom.train_jsonl" not in made.text()


@pytest.mark.parametrize(
    ("kind", "fields", "key", "value", "left_out"),
    [
        (
            "trl",
            {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
            f"{GRPO}.steps_per_generation",
            1,
            "steps_per_generation",
        ),
        ("trl", {"warmup_ratio": 0.1, "min_p": 0}, "training.warmup_steps", 0.1, None),
        ("trl", {"use_vllm": True}, f"{MATCHING}.rollout_backend", "vllm", None),
        ("swift", {"use_vllm": False}, f"{MATCHING}.rollout_backend", "hf", None),
        ("trl", {"top_k": 0}, f"{MATCHING}.decoding.top_k", -1, None),
        ("trl", {"vllm_enable_sleep_mode": True}, f"{MATCHING}.vllm.sleep_level", 1, None),
        ("trl", {"vllm_server_host": "0.0.0.0"}, f"{SERVER}.base_url", "http://127.0.0.1:8000", None),
        ("trl", {"attn_implementation": "sdpa"}, "model.attn_impl", "sdpa", None),
        ("trl", {"lora_target_modules": ["q", "v"]}, "tuner.target_regex", r".*\.(q|v)", None),
        ("trl", {"max_prompt_length": 7, "max_completion_length": 5}, "global_max_length", 12, None),
        (
            "trl",
            {"model_init_kwargs": {"dtype": torch.float32, "revision": None}},
            "model.torch_dtype",
            "float32",
            None,
        ),
        ("trl", {"model_init_kwargs": '{"attn_implementation": "sdpa"}'}, "model.attn_impl", "sdpa", None),
        ("trl", {"model_init_kwargs": {"device_map": "auto"}}, "model.revision", None, "model_init_kwargs.device_map"),
        ("trl", {"max_tool_calling_iterations": 3}, "custom.extra.environment.max_turns", 4, None),
        ("swift", {"sleep_level": 2}, f"{MATCHING}.vllm.sleep_level", 1, None),
        ("swift", {"adapters": ["a"]}, "model.adapter", "a", None),
        ("swift", {"adapters": ["a", "b"]}, "model.adapter", None, "adapters"),
        ("swift", {"advantage_estimator": "rloo"}, f"{GRPO}.baseline", "leave_one_out", None),
        ("swift", {"dataset": ["a.jsonl", "b.jsonl"]}, "custom.train_jsonl", None, "dataset"),
        ("swift", {"dataset": "a.jsonl#100"}, "custom.train_jsonl", "a.jsonl", "dataset"),
        ("swift", {"dataset": "AI-MO/NuminaMath-TIR#1000"}, "custom.dataset.source", "AI-MO/NuminaMath-TIR", "dataset"),
        ("swift", {"dataset": ["AI-MO/NuminaMath-TIR#1000"]}, "custom.dataset.take", 1000, "dataset"),
        ("swift", {"dataset": "HF::org/x:sub"}, "custom.dataset.name", "sub", "dataset"),
        ("trl", {"kl_in_reward": False, "do_train": True, "shuffle_dataset": True}, "kl_in_reward", None, None),
        ("trl", {"kl_in_reward": True, "remove_unused_columns": True}, "kl_in_reward", None, "kl_in_reward"),
        ("swift", {"dynamic_sample": False, "use_hf": True, "dataset_shuffle": True}, "use_hf", None, None),
        ("swift", {"dynamic_sample": True}, f"{GRPO}.dynamic_sampling", {"max_rounds": 3}, None),
        (
            "swift",
            {"dynamic_sample": True, "max_resample_times": 5},
            f"{GRPO}.dynamic_sampling",
            {"max_rounds": 5},
            None,
        ),
        ("swift", {"max_resample_times": 5}, f"{GRPO}.dynamic_sampling", None, None),
    ],
)
def test_a_value_of_the_source_becomes_ours_or_is_left_out(kind, fields, key, value, left_out):
    made = convert(kind, fields)
    assert made.keys.get(key) == value
    assert made.left_out.keys() - convert(kind, {}).left_out.keys() == ({left_out} if left_out else set())


@pytest.mark.parametrize("launcher", ["torchrun --nproc_per_node 2", "deepspeed --num_gpus 2", "accelerate launch"])
def test_ms_swift_behind_a_launcher_is_ms_swift(launcher):
    words = f"{launcher} /opt/ms-swift/swift/cli/rlhf.py --rlhf_type grpo --vllm_mode server"
    made = convert(*read_source(shlex.split(words)))
    assert made.keys[f"{SERVER}.base_url"] == "http://127.0.0.1:8000", "ms-swift's default"
    assert made.keys["tuner.train_type"] == "lora"


def test_what_documentation_leaves_out_is_not_read(tmp_path):
    (tmp_path / "page.py").write_text("GRPOTrainer(model=..., args=GRPOConfig(num_generations=2, beta=None))")
    made = convert(*read_source([str(tmp_path / "page.py")]))
    assert made.left_out == {"model_name_or_path": "... is no plain value"}
    assert f"{GRPO}.beta" not in made.keys, "null is what is not given"


@given(st.integers(1, 64), st.integers(1, 16), st.integers(2, 16), st.integers(1, 4))
def test_a_step_and_a_generation_keep_their_numbers_of_completions(size, accumulation, group, steps_of_one):
    fields = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        "num_generations": group,
        "steps_per_generation": accumulation * steps_of_one,
    }
    made = convert("trl", fields)
    fewer = group // math.gcd(size * accumulation, group)
    prompts = made.keys["training.per_device_train_batch_size"] * made.keys["training.gradient_accumulation_steps"]
    assert prompts * group == size * accumulation * fewer, "by so many times fewer processes, as many completions"
    assert made.keys[f"{GRPO}.steps_per_generation"] == steps_of_one
    said = made.changed.get("gradient_accumulation_steps", "")
    assert bool(said) == (fewer > 1)
    assert f"{accumulation * fewer} where it was {accumulation}" in said or fewer == 1
    assert f"{fewer} times fewer processes" in said or fewer == 1


@pytest.mark.scenario(clauses=["configuration/configurations-of-other-trainers-can-be-imported#3"])
def test_groups_that_ms_swift_spreads_over_processes_are_one_process_s(tmp_path, capsys):
    """As most commands of ms-swift are posted: one completion a process, and as many processes as a group has."""
    line = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model M --num_generations 4 --gradient_accumulation_steps 1"
    assert main(["import-config", "--out", str(tmp_path / "ours.yaml"), "--", *shlex.split(line)]) == 0
    said = "# changed: gradient_accumulation_steps: 4 where it was 1"
    assert said in (text := (tmp_path / "ours.yaml").read_text())
    assert "Train by 2 of 8 processes for as many completions per step" in text
    assert said in capsys.readouterr().out, "notes are printed, too"


NEEDED_KEYS = [
    *("model.model=m", "custom.train_jsonl=t.jsonl", "training.output_dir=o"),
    "custom.extra.grpo.rewards=[{function: 'a:b'}]",
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 3, 8, 10**6]),
    st.sampled_from([-0.5, 0.0, 0.2, 0.9, 1.0, 1.5, 5.0]),
    st.sampled_from(
        [
            *("", "no", "none", "steps", "epoch", "1e-6", "...", "grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo"),
            *("token", "sequence", "sequence_mask", "token_truncate", "group", "batch", "server", "colocate", "lora"),
            *("full", "zero2", "fsdp2", "cosine", "adamw_8bit", "flash_attention_2", "http://h:8000/v1", "a.jsonl"),
        ]
    ),
    st.just([]),
    st.just(["q_proj", "v_proj"]),
    st.just([8000, 8000]),
    st.just({"a": 1}),
)
RELATED = ["importance_sampling_level", "loss_type", "top_entropy_quantile", "delta", "epsilon", "epsilon_high"]
RELATED += ["num_generations", "temperature", "beta", "use_vllm", "vllm_mode", "vllm_server_port", "num_iterations"]
"""Fields of rules that read several."""


@pytest.mark.scenario(clauses=["configuration/configurations-of-other-trainers-can-be-imported#2"])
@pytest.mark.parametrize(
    ("kind", "file", "section"), [("trl", "trl/arguments", None), ("swift", "swift/options", "rlhf_defaults")]
)
def test_what_is_written_passes_the_rules_and_all_else_is_refused_by_its_name(tmp_path_factory, kind, file, section):
    recorded = json.loads((ROOT / f"fixtures/{file}.json").read_text())
    names = sorted((recorded[section] if section else recorded).keys() - {"version", "rlhf_type", "hub_token"})
    source, out = (tmp_path_factory.getbasetemp() / f"{kind}-{name}.yaml" for name in ("source", "ours"))

    @given(st.dictionaries(st.sampled_from([*RELATED, *names]), VALUES, max_size=8))
    def attempt(fields):
        source.write_text(yaml.safe_dump(fields | ({"rlhf_type": "grpo"} if kind == "swift" else {"do_train": True})))
        try:
            import_config(argparse.Namespace(source=[str(source)], out=out))
        except ErrorList as found:
            errors = found.errors
        except ConfigError as error:
            errors = [error]
        else:
            tree = parse_mapping(out.read_text(), origin="ours")
            ones = NEEDED_KEYS if "dataset" not in tree["custom"] else [*NEEDED_KEYS[:1], *NEEDED_KEYS[2:]]
            missing = [one for one in ones if not holds(tree, one.partition("=")[0].split("."))]
            load_config(str(out), missing)
            return
        for error in errors:
            assert error.key in [*names, "SOURCE"], f"a field of the source: {error}"
            assert error.remedy

    attempt()


@pytest.mark.parametrize("value", [True, "8", 8.0])
def test_a_size_that_is_no_whole_number_is_refused(value):
    with refused("import-batch", "per_device_train_batch_size", problem=f"is {value!r}, not a whole number"):
        convert("trl", {"per_device_train_batch_size": value})


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"model": "\u00e9"}, "swift"), ({"rlhf_type": "grpo"}, "swift"), ({"model_name_or_path": "M"}, "trl")],
)
def test_a_yaml_is_known_by_the_names_that_only_one_of_both_has(tmp_path, fields, kind):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(fields))
    assert read_source([str(tmp_path / "c.yaml")]) == (kind, fields)
    text = convert(kind, fields).text()
    assert ("  model: \u00e9\n" in text) == ("model" in fields)
    assert ("# not set here, and needed: training.output_dir\n" in text) == ("model" not in fields), (
        "ms-swift names one"
    )


@pytest.mark.parametrize("words", [["no-such.yaml"], ["accelerate", "launch"], ["swift", "rlhf", "grpo"]])
def test_what_is_no_configuration_is_refused(words):
    with refused("import-source-unreadable", "SOURCE"):
        read_source(words)


@pytest.mark.parametrize(
    "command", ["swift sft --model m", "swift rlhf --rlhf_type dpo --model m", "trl dpo --beta 1", "dpo.yaml"]
)
def test_what_trains_otherwise_is_not_made_a_run_of_grpo(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dpo.yaml").write_text("{rlhf_type: dpo, model: m}")
    with refused("import-source-unreadable", "SOURCE", problem="only GRPO is imported"):
        read_source(command.split())


def test_megatron_s_options_are_refused_though_one_names_a_script():
    with refused("import-source-unreadable", "SOURCE", problem="Megatron", remedy="swift rlhf"):
        read_source(["megatron", "rlhf", "--rlhf_type", "grpo", "--model", "M", "--external_plugins", "plugin.py"])


@pytest.mark.parametrize("text", ["{model: {model: m}}", "{extends: base.yaml}", "{rollout: {max_new_tokens: 8}}"])
def test_our_own_configuration_is_not_taken_for_another(tmp_path, text):
    (tmp_path / "own.yaml").write_text(text)
    with refused("import-source-unreadable", "SOURCE", problem="is a configuration of rollmatch already"):
        read_source([str(tmp_path / "own.yaml")])


def test_variables_before_a_command_are_read():
    """As in ms-swift's examples; how many processes there are is said to ``rollmatch train``."""
    words = ["MAX_PIXELS=602112", "NPROC_PER_NODE=8", "swift", "rlhf", "--rlhf_type", "grpo", "--model", "M"]
    made = convert(*read_source(words))
    assert made.keys["model.processor_kwargs.max_pixels"] == 602112
    assert made.left_out == {}


def test_a_script_is_read_with_its_command_line(tmp_path):
    """As TRL's examples are started, whose scripts read all settings from it."""
    path = tmp_path / "grpo_vlm.py"
    path.write_text(
        """
rows = load_dataset("lmms-lab/open-r1", split="train")
trainer = GRPOTrainer(model=model_args.model_name_or_path, args=training_args, reward_funcs=[accuracy_reward])
"""
    )
    line = f"accelerate launch --config_file=zero3.yaml {path} --model_name_or_path M --output_dir o --beta 0.1"
    made = convert(*read_source(shlex.split(line)))
    assert (made.keys["model.model"], made.keys[f"{GRPO}.beta"], made.keys["training.output_dir"]) == ("M", 0.1, "o")
    assert made.keys[f"{GRPO}.rewards"] == [{"function": "trl.rewards:accuracy_reward", "weight": 1.0}]
    assert made.keys["custom.dataset.source"] == "lmms-lab/open-r1"
    (tmp_path / "other.py").write_text("trainer = RLOOTrainer(args=RLOOConfig(beta=0.1))")
    with refused("import-source-unreadable", "SOURCE", problem="RLOOConfig", remedy="leave_one_out"):
        read_source([str(tmp_path / "other.py")])
    with refused("import-source-unreadable", "SOURCE", problem="has no GRPOConfig(...)"):
        read_source([str(path)])


def test_what_only_running_a_script_would_tell_is_left_out(tmp_path):
    path = tmp_path / "train_it.py"
    path.write_text(
        """
rate, length = 1e-5, 100
prompt_length = 100
args = GRPOConfig(output_dir="o", max_prompt_length=prompt_length, learning_rate=cli.rate, beta=rate)
trainer = GRPOTrainer(model, [short, lib.long], args)
"""
    )
    made = convert(*read_source([str(path)]))
    assert made.keys["global_max_length"] == 100 + 512
    assert made.left_out == {
        "learning_rate": "cli.rate is no plain value",
        "beta": "rate is no plain value",
        "model_name_or_path": "model is no plain value",
        "train_it.py": "importing it would train: move its reward functions to train_it_rewards.py",
    }
    assert [one["function"] for one in made.keys[f"{GRPO}.rewards"]] == ["train_it_rewards:short", "lib:long"]
    assert "needed: model.model" not in made.text()


def test_a_script_s_data_set_is_read(tmp_path):
    path = tmp_path / "train_it.py"
    path.write_text(
        """
from datasets import load_dataset
from trl import GRPOConfig
rows = load_dataset("openai/gsm8k", "main", split="train[:90%]")
held = load_dataset("openai/gsm8k", "main", split="test")
args = GRPOConfig(output_dir="out", eval_strategy="steps", eval_steps=5)
"""
    )
    made = convert(*read_source([str(path)]))
    of = {name: made.keys[f"custom.dataset.{name}"] for name in ("source", "name", "train", "val")}
    assert of == {"source": "openai/gsm8k", "name": "main", "train": "train[:90%]", "val": "test"}
    assert made.keys["training.eval_steps"] == 5
    path.write_text('GRPOConfig(output_dir="o")\nrows = load_dataset("json", data_files="a.json", split="train")\n')
    keys = convert(*read_source([str(path)])).keys
    assert (keys["custom.dataset.source"], keys["custom.dataset.train"]) == ("json", "a.json")


def imported(tmp_path, *, before="", trainer="", config=""):
    path = tmp_path / "run.py"
    path.write_text(f"{before}\ndef main():\n    GRPOTrainer({trainer}, args=GRPOConfig(output_dir='o', {config}))\n")
    return convert(*read_source([str(path)]))


def test_the_data_set_of_the_trainer_is_read(tmp_path):
    """Not that of its tools, which is loaded first; two splits at once are those of training and evaluation."""
    before = """
graph = load_dataset("org/graph")
train, held = load_dataset("org/sums", split=["train[:5%]", "test[:5%]"])
"""
    made = imported(tmp_path, before=before, trainer="'M', train_dataset=train", config="eval_strategy='steps'")
    of = {name: made.keys[f"custom.dataset.{name}"] for name in ("source", "train", "val", "columns")}
    assert of == {"source": "org/sums", "train": "train[:5%]", "val": "test[:5%]", "columns": {"prompt": "prompt"}}
    assert made.left_out == {}


@pytest.mark.parametrize("maker", ["map(to_chat)", "filter(is_short)", "train_test_split(0.1)['train']"])
def test_rows_that_a_script_makes_are_asked_for(tmp_path, maker):
    """Without them the run would learn from others: another column as the answer, or held-out samples."""
    before = f"def rows():\n    data = load_dataset('org/sums')\n    return data.{maker}\n"
    text = imported(tmp_path, before=before, trainer="'M', train_dataset=rows()").text()
    assert "write them with to_json, and name that file in custom.train_jsonl" in text
    assert "\n  dataset:" not in text
    assert "needed: custom.train_jsonl" not in text, "said once"


def test_values_that_a_script_computes_of_plain_ones_are_read(tmp_path):
    before = "length = 1024\nroom = 256\nC = {'rate': 1e-5, 'g': [4]}\nfolder = f'm-{room}'"
    config = "max_prompt_length=room, max_completion_length=length - room, learning_rate=C['rate'], "
    config += "num_generations=C['g'][0]"
    keys = imported(tmp_path, before=before, trainer="folder", config=config).keys
    assert (keys[f"{MATCHING}.max_new_tokens"], keys["global_max_length"]) == (768, 1024)
    assert (keys["training.learning_rate"], keys[f"{GRPO}.num_generations"]) == (1e-5, 4)
    assert keys["model.model"] == "m-256"
    twice = imported(tmp_path, before="rate = 1\nrate = 2", trainer="'M'", config="learning_rate=rate, beta=1 / 0")
    assert twice.left_out == {"learning_rate": "rate is no plain value", "beta": "1 / 0 is no plain value"}


def test_a_model_and_its_adapters_are_those_that_the_script_makes(tmp_path):
    """A model that is loaded and wrapped before it is passed; without r=32, all of its weights would be trained."""
    before = """
size = 32
model, tokenizer = Fast.from_pretrained(model_name="Qwen/Qwen2.5-3B", load_in_4bit=True, dtype=torch.float16)
model = Fast.get_peft_model(model, r=size, target_modules=["q_proj"], random_state=3407)
"""
    made = imported(tmp_path, before=before, trainer="model=model")
    tuner = {name: made.keys[f"tuner.{name}"] for name in ("train_type", "lora_rank", "lora_alpha", "lora_dropout")}
    assert tuner == {"train_type": "lora", "lora_rank": 32, "lora_alpha": 16, "lora_dropout": 0.0}
    assert (made.keys["model.model"], made.keys["model.torch_dtype"]) == ("Qwen/Qwen2.5-3B", "float16")
    assert made.left_out == {"load_in_4bit": "no counterpart"}
    keys = imported(tmp_path, trainer="'M', peft_config=LoraConfig(r=4, bias='none', task_type='CAUSAL_LM')").keys
    assert (keys["tuner.lora_rank"], keys["tuner.lora_alpha"], keys["tuner.lora_dropout"]) == (4, 8, 0.0), "peft's own"


def test_what_a_trainer_gets_besides_is_named(tmp_path):
    before = "from my.scores import right as correct\nscores = [correct, own]"
    made = imported(tmp_path, before=before, trainer="'M', reward_funcs=scores, tools=[ask], environment_factory=Game")
    assert made.left_out == {
        "tools": "name them in environment.tools as module:function",
        "environment_factory": "name the class in environment.tools as module:Class",
    }
    assert [one["function"] for one in made.keys[f"{GRPO}.rewards"]] == ["my.scores:right", "run:own"]


def test_a_configuration_of_open_r1_passes_check_on_its_data(tmp_path, capsys, monkeypatch):
    """Its own names for the column of questions and the system message; rewards get all other columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "open_scores.py").write_text("def right(completions, solution, **others):\n    return [1.0, 0.0]\n")
    rows = [{"problem": f"{number} + 1?", "solution": f"{number + 1}", "level": 3} for number in range(8)]
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums/train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    fields = {
        "model_name_or_path": str(ROOT / "fixtures/models/arithmetic"),
        "dataset_name": "sums",
        "dataset_prompt_column": "problem",
        "system_prompt": "Add.",
        "reward_funcs": ["open_scores.right"],
        "num_generations": 2,
        "max_prompt_length": 32,
        "max_completion_length": 8,
        "use_vllm": False,
        "bf16": False,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "output_dir": "out",
        "report_to": ["none"],
    }
    (tmp_path / "r1.yaml").write_text(yaml.safe_dump(fields))
    assert main(["import-config", "r1.yaml", "--out", "ours.yaml"]) == 0
    assert "#" not in (tmp_path / "ours.yaml").read_text()
    status = main(["check", "ours.yaml"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "system: Add." in printed.out
    assert "ok: nothing is wrong" in printed.out


def test_a_yaml_of_a_command_line_gives_way_to_its_options(tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps({"beta": 0.1, "epsilon": 0.3}))
    kind, fields = read_source(["trl", "grpo", "--config", str(tmp_path / "c.yaml"), "--beta", "0.2"])
    assert (kind, fields) == ("trl", {"beta": 0.2, "epsilon": 0.3})


def test_one_weight_is_a_list_of_one_and_uneven_lists_are_refused():
    one = convert(*read_source(["trl", "grpo", "--reward_funcs", "my.right", "--reward_weights", "0.5"]))
    assert one.keys["custom.extra.grpo.rewards"] == [{"function": "my:right", "weight": 0.5}]
    with refused("import-uneven", "reward_weights", problem="has 2 values for 1"):
        convert(*read_source(["trl", "grpo", "--reward_funcs", "my.right", "--reward_weights", "1", "2"]))
    two_hosts = ["--vllm_server_host", "a", "b", "--vllm_server_port", "8000", "--per_device_train_batch_size", "8"]
    with refused("import-uneven", "vllm_server_port", problem="has 1 values for 2"):
        convert(*read_source(["swift", "rlhf", *two_hosts]))


SCRIPT = """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

def short(completions, **columns):
    return [1.0 / (1 + len(text)) for text in completions]

args = GRPOConfig(output_dir="out", num_generations=4, per_device_train_batch_size=8, max_prompt_length=100, beta=0.1)
GRPOTrainer("Qwen/Qwen3-0.6B", [accuracy_reward, short], args=args, peft_config=LoraConfig(r=4)).train()
"""


def test_a_script_of_trl_is_read_without_being_run(tmp_path, capsys):
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT)
    assert main(["import-config", str(path)]) == 0
    text = capsys.readouterr().out
    read = yaml.safe_load(text)
    grpo, training = read["custom"]["extra"]["grpo"], read["training"]
    assert read["model"] == {"model": "Qwen/Qwen3-0.6B"}
    assert [one["function"] for one in grpo["rewards"]] == ["trl.rewards:accuracy_reward", "train_it_rewards:short"]
    assert (grpo["num_generations"], grpo["beta"], training["per_device_train_batch_size"]) == (4, 0.1, 2)
    assert (read["overlong"], read["global_max_length"]) == ("truncate_left", 100 + 512)
    assert (read["tuner"]["train_type"], read["tuner"]["lora_rank"]) == ("lora", 4)
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# not set here, and needed: custom.train_jsonl",
        "# left out: train_it.py: importing it would train: move its reward functions to train_it_rewards.py",
    ]
    (tmp_path / "none.py").write_text("print(1)")
    assert main(["import-config", str(tmp_path / "none.py")]) == 1
    assert "[import-source-unreadable]" in capsys.readouterr().err
