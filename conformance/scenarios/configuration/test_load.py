import copy
import dataclasses
import re
import sys
from typing import get_args

import pytest
from transformers import TrainingArguments

from conformance.doubles.configs import VALID, config_with, rejected
from conformance.doubles.refusals import refused
from rollmatch.config import RunConfig, load_config, make, resolved_yaml
from rollmatch.config.findings import INSTEAD, OTHER_NAMES
from rollmatch.config.layers import merge, nested
from rollmatch.config.schema import fields, section_of
from rollmatch.config.training import FURTHER, NOT_USED, TrainingConfig
from rollmatch.errors import ConfigError, ErrorList


@pytest.mark.scenario(
    "decoding/beam-search-on-hf-is-accepted",
    "weight-sync/the-default-mode-is-full",
    "rollout-backends/the-default-backend-is-vllm",
    "rollout-backends/four-ranks-share-one-engine",
    clauses=[
        "decoding/decoding-is-greedy-by-default#1,3",
        "weight-sync/the-sync-mode-is-chosen-in-yaml#2",
        "rollout-backends/the-rollout-backend-is-chosen-in-yaml#1,2",
        "rollout-backends/a-colocated-engine-leaves-room-for-training#1,2",
    ],
)
def test_defaults_stand_where_nothing_is_said():
    config = config_with()
    rollout = config.custom.extra.rollout_matching
    assert (rollout.rollout_backend, rollout.decode_mode, rollout.vllm.mode) == ("vllm", "greedy", "colocate")
    assert (rollout.vllm.gpu_memory_utilization, rollout.vllm.sync.mode) == (0.45, "full")
    assert (rollout.decoding.temperature, rollout.decoding.top_p, rollout.decoding.top_k) == (0.0, 1.0, -1)
    training = config.training
    assert (training.packing, training.packing_buffer, training.packing_min_fill_ratio) == (False, None, 0.65)


@pytest.mark.scenario(
    "configuration/one-word-resets-a-section",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#8"],
)
def test_one_word_resets_a_section():
    lora = ("tuner.train_type=lora", "tuner.lora_rank=4", "tuner.target_regex=.*q_proj")
    with refused("adapter-option-without-lora", remedy="--set tuner=null resets the whole section"):
        config_with(*lora[:2], "tuner.train_type=full")
    assert {key for _, key in rejected(*lora, "tuner.train_type=full")} == {"tuner.lora_rank", "tuner.target_regex"}
    assert config_with(*lora, "tuner=null").tuner == config_with().tuner
    assert rejected("model=null") == [("missing-key", "model.model")]


def test_neither_the_given_tree_nor_a_config_can_be_changed():
    before = copy.deepcopy(VALID)
    config = make(VALID)
    with refused("wrong-type", "training"):
        make({**VALID, "training": 5})
    assert before == VALID
    with pytest.raises(ValueError, match="frozen"):
        config.training.seed = 3


@pytest.mark.scenario(
    "decoding/a-negative-temperature-is-refused",
    "decoding/a-top-p-of-zero-is-refused",
    "decoding/a-top-k-of-zero-is-refused",
    "decoding/the-ends-of-the-ranges-are-accepted",
    "decoding/the-value-in-its-new-place-is-accepted",
    "configuration/the-right-spelling-is-accepted",
    "configuration/an-unknown-trainer-variant-is-refused",
    "configuration/the-right-trainer-variant-is-accepted",
    "rollout-backends/an-unknown-backend-is-refused",
    clauses=[
        "decoding/sampling-is-configured-under-decoding#2,4,5,6",
        "configuration/rollout-matching-is-chosen-by-its-trainer-variant#1,2",
    ],
)
@pytest.mark.parametrize(
    ("override", "code", "repaired"),
    [
        ("training.seed=1.0", "wrong-type", "1"),
        ("training.seed=true", "wrong-type", "1"),
        ("training.seed=-1", "out-of-range", "0"),
        ("training.bf16=1", "wrong-type", "true"),
        ("training.bf16=yes", "wrong-type", "true"),
        ("training.learning_rate='1e-5'", "wrong-type", "1e-5"),
        ("training.learning_rate=.inf", "out-of-range", "1"),
        ("training.learning_rate=-1", "out-of-range", "0"),
        ("training.max_steps=-2", "out-of-range", "-1"),
        ("training.packing_buffer=0", "out-of-range", "1"),
        ("training.packing_min_fill_ratio=0", "out-of-range", "0.01"),
        ("training.packing_min_fill_ratio=1.01", "out-of-range", "1"),
        ("training.output_dir=''", "out-of-range", "x"),
        ('model.model="a\\0b"', "out-of-range", "ab"),
        ('~.vllm.sync.mode="full\\0"', "out-of-range", "full"),
        ('training.report_to=["none\\0"]', "out-of-range", "[none]"),
        ("training.save_total_limit=0", "out-of-range", "null"),
        ("training.optim=null", "wrong-type", "adamw_torch"),
        ("training.report_to=[]", "out-of-range", "[none]"),
        ("global_max_length=0", "out-of-range", "4096"),
        ("model.attn_impl=flash", "not-a-choice", "packed"),
        ("tuner.lora_dropout=1", "out-of-range", "0.99"),
        ("tuner.target_regex='a b'", "regex-white-space", "ab"),
        ("tuner.target_regex='(a'", "regex-malformed", "'(a)'"),
        ("custom.trainer_variant=dpo", "not-a-choice", "rollout_matching_sft"),
        ("~.rollout_backend=sglang", "not-a-choice", "hf"),
        ("~.rollout_backend=3", "not-a-choice", "hf"),
        ("~.decoding.temperature=-0.1", "out-of-range", "0.0"),
        ("~.decoding.top_p=0", "out-of-range", "0.1"),
        ("~.decoding.top_p=1.5", "out-of-range", "1"),
        ("~.decoding.top_k=0", "out-of-range", "1"),
        ("~.decoding.top_k=-2", "out-of-range", "-1"),
        ("~.maskiou_gate=1.1", "out-of-range", "1.0"),
        ("~.maskiou_resolution=1", "out-of-range", "2"),
        ("~.fp_cost=1001", "out-of-range", "1000"),
        ("~.fn_cost=1001", "out-of-range", "1000"),
        ("~.vllm.mode=remote", "not-a-choice", "colocate"),
        ("~.vllm.sleep_level=2", "not-a-choice", "1"),
        ("~.vllm.sync.mode=lora", "not-a-choice", "full"),
        ("~.vllm.gpu_memory_utilization=0", "out-of-range", "1"),
        ("~.vllm=[]", "wrong-type", "null"),
        ("~.vllm.tensor_parallel_size=0", "out-of-range", "2"),
    ],
)
def test_a_wrong_value_is_refused_and_a_right_one_taken(override, code, repaired):
    key, _, _ = override.partition("=")
    assert rejected("tuner.train_type=lora", override) == [(code, key)]
    config_with("tuner.train_type=lora", f"{key}={repaired}")


@pytest.mark.parametrize(("length", "shown"), [(58, f"'{'x' * 58}'"), (59, f"'{'x' * 59}...")])
def test_a_wrong_value_is_shown_up_to_sixty_characters(length, shown):
    with refused("wrong-type", "training.seed") as caught:
        config_with(f"training.seed={'x' * length}")
    assert str(caught.value).count(f", but is {shown}.") == 1


def test_a_value_inside_a_mapping_or_list_is_named_by_its_place():
    images = "~.vllm.limit_mm_per_prompt.image"
    assert rejected(f"{images}=-1") == [("out-of-range", images)]
    for wrong, place in (("[wandb, x]", 1), ("mlflow", 0), ("[mlflow, wandb]", 0)):
        assert rejected(f"training.report_to={wrong}") == [("not-a-choice", f"training.report_to.{place}")]
    both = [("not-a-choice", f"training.report_to.{place}") for place in (0, 1)]
    assert rejected("training.report_to=[mlflow, x]") == both
    config = config_with(f"{images}=1", "training.report_to=wandb", "~.rollout_backend=VLLM")
    assert (config.training.report_to, config.custom.extra.rollout_matching.rollout_backend) == (("wandb",), "vllm")


@pytest.mark.scenario(
    "configuration/a-misspelt-key-is-refused-with-the-right-spelling",
    clauses=["configuration/unknown-keys-are-refused#1,2"],
)
@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("training.packing_bufer=1", "training.packing_buffer"),
        ("packing_buffer=1", "training.packing_buffer"),
        ("training.bf=true", "training.bf16"),
        ("custom.decode_mode=beam", "custom.extra.rollout_matching.decode_mode"),
        ("trainig.seed=1", "training"),
        ("~.vllm.fallback_to_ful=true", "custom.extra.rollout_matching.vllm.sync.fallback_to_full"),
        ("~.mode=colocate", "custom.extra.rollout_matching.vllm.mode"),
        ("~.sync.mode=full", "custom.extra.rollout_matching.vllm.sync"),
        ("rlhf.num_generations=4", "custom.extra.grpo.num_generations"),
        ("rlhf.beta=0.04", "custom.extra.grpo.beta"),
        ("rlhf.reward_funcs=[accuracy]", "custom.extra.grpo.rewards"),
        ("rlhf.max_completion_length=512", "custom.extra.rollout_matching.max_new_tokens"),
        ("tuner.target_modules=all-linear", "tuner.target_regex"),
        ("tuner.type=lora", "tuner.train_type"),
        ("model.model_name_or_path=x", "model.model"),
        ("training.max_length=4096", "global_max_length"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(override, meant):
    with refused("unknown-key", remedy=f"Did you mean {meant}?"):
        config_with(override)


def test_a_key_that_only_transformers_knows_is_shown_its_section():
    with pytest.raises(ErrorList) as caught:
        config_with("training.fp16=true", "training.zzz=1", "model.zzz=1")
    model, half, other = caught.value.errors
    assert half.remedy == "Move it to training.extra_arguments.fp16."
    assert "training.extra_arguments" in other.remedy
    assert model.remedy == "Remove it; rollmatch schema lists all keys."


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("warmup_ratio", "Write warmup_steps: a value below 1 is a share of all steps, such as 0.03."),
        ("evaluation_strategy", "Set training.eval_steps; 0 evaluates before and after training only."),
        ("overwrite_output_dir", "Remove it, and start with --overwrite."),
        ("group_by_length", "even out micro-batches instead."),
        ("train_sampling_strategy", "even out micro-batches instead."),
        ("label_smoothing_factor", "Remove it: samples, losses and evaluations are not those of transformers."),
        ("optim_args", "Move it to training.extra_arguments.optim_args."),
        ("logging_first_step", "Move it to training.extra_arguments.logging_first_step."),
        ("per_gpu_train_batch_size", "Did you mean training.per_device_train_batch_size?"),
    ],
)
def test_a_key_of_transformers_is_not_taken_for_one_that_is_spelt_alike(name, remedy):
    with refused("unknown-key", f"training.{name}", remedy=remedy):
        config_with(f"training.{name}=1")


@pytest.mark.scenario(clauses=["configuration/unknown-keys-are-refused#4"])
def test_every_field_of_transformers_has_an_answer():
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    answered = FURTHER | NOT_USED | set(INSTEAD) | set(OTHER_NAMES) | set(TrainingConfig.model_fields)
    assert fields <= answered
    assert fields >= FURTHER


@pytest.mark.parametrize(("key", "lost"), [("training.seed", None), ("model.model", "model")])
def test_a_key_written_with_dots_is_one_problem_and_shown_its_nested_form(key, lost):
    section, _, name = key.partition(".")
    tree = {**{each: value for each, value in VALID.items() if each != lost}, key: 7}
    with refused("unknown-key", key, remedy=f"{section}: {{{name}: ...}}"):
        make(tree)


def test_arguments_of_datasets_are_answered_by_ours():
    for name in ("data_files", "split"):
        with refused("unknown-key", f"custom.dataset.{name}", remedy="Use train and val"):
            make(merge(VALID, nested({f"custom.dataset.{name}": "d.jsonl", "custom.dataset.source": "json"})))


def test_every_other_name_leads_to_a_key_that_exists():
    assert set(OTHER_NAMES.values()) <= set(fields())
    assert not set(OTHER_NAMES) & set(fields())


@pytest.mark.scenario(
    "decoding/a-flat-temperature-is-refused",
    "decoding/two-flat-keys-give-two-problems",
    "configuration/a-section-at-the-top-level-is-refused",
    "configuration/a-buffer-that-is-switched-off-is-refused-too",
    "packing/a-key-for-another-row-length-is-refused",
    clauses=[
        "decoding/flat-decoding-keys-are-refused#1,2",
        "configuration/rollout-matching-is-chosen-by-its-trainer-variant#3",
        "configuration/a-rollout-buffer-is-refused#1,2",
        "packing/packing-happens-after-the-rollouts#2,3",
    ],
)
@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("~.temperature=0", "Use custom.extra.rollout_matching.decoding.temperature."),
        ("~.top_p=0.9", "Use custom.extra.rollout_matching.decoding.top_p."),
        ("~.top_k=5", "Use custom.extra.rollout_matching.decoding.top_k."),
        ("~.rollout_buffer={enabled: false}", "Remove it: asynchronous prefetch replaces it."),
        ("~.rollout_buffer=null", "Remove it: asynchronous prefetch replaces it."),
        ("training.packing_length=8", "Use global_max_length, which is the length of a packed row."),
        ("rollout_matching={}", "Move it to custom.extra.rollout_matching."),
    ],
)
def test_a_removed_key_says_where_to_go_whatever_its_value(override, remedy):
    with pytest.raises(ErrorList) as caught:
        config_with(override)
    assert [(error.code, error.remedy) for error in caught.value.errors] == [("removed-key", remedy)]


@pytest.mark.scenario(
    "configuration/three-mistakes-give-three-problems",
    clauses=["configuration/all-problems-of-a-config-are-reported-at-once#1,2,4"],
)
def test_all_errors_are_config_errors_with_four_parts():
    with pytest.raises(ErrorList) as caught:
        config_with("training.seed=x", "custom.x=1", "~.temperature=1", "tuner.use_dora=true", "global_max_length=1")
    assert len(caught.value.errors) == 5
    for error in caught.value.errors:
        assert isinstance(error, ConfigError)
        assert all((error.code, error.key, error.problem, error.remedy))


def test_the_resolved_tree_holds_every_key_and_loads_back_equal(tmp_path):
    config = config_with(
        "training.learning_rate=1e-7", "tuner={train_type: lora, target_regex: '1e5'}", "custom.prompts.system='a: #b'"
    )
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config(path) == config
    for key, field in fields().items():
        assert section_of(field) is not None or f"{key.rpartition('.')[2]}:" in path.read_text()


def test_every_field_is_described_and_every_number_has_a_unit():
    for key, field in fields().items():
        assert field.description, key
        is_number = {int, float} & {field.annotation, *get_args(field.annotation)}
        assert not is_number or re.search(r"\sUnit: [\w -]+\.$", field.description), key


def test_required_keys_carry_a_stand_in():
    required = [field for field in fields().values() if field.is_required() and section_of(field) is None]
    assert len(required) == 4
    assert all(field.examples for field in required)
    assert RunConfig.model_fields["custom"].is_required()


def test_a_stand_in_that_its_own_key_refuses_is_named_and_not_tried_for_ever(monkeypatch):
    variant = copy.copy(fields()["custom.trainer_variant"])
    variant.examples = ["none of the choices"]
    monkeypatch.setattr(
        sys.modules[load_config.__module__], "fields", lambda: fields() | {"custom.trainer_variant": variant}
    )
    with pytest.raises(AssertionError, match=r"custom\.trainer_variant"):
        make({})
    assert make(VALID).custom.trainer_variant


def test_secrets_are_hidden_in_the_resolved_configuration():
    config = config_with(
        "custom.trainer_variant=grpo",
        "custom.extra.environment.name=fixtures.tasks.treasures:TwoTreasures",
        "custom.extra.environment.options.api_key=hf_abc",
        "custom.extra.environment.max_response_tokens=512",
        "~.rollout_backend=vllm",
        "~.vllm.mode=server",
        "~.vllm.server.base_url=http://me:word@node7:8000",
        "~.vllm.server.group_port=51216",
    )
    text = resolved_yaml(config)
    assert not any(secret in text for secret in ("hf_abc", "me:word"))
    assert text.count("***") == 2
    assert "node7:8000" in text


def test_a_secret_that_every_checkpoint_would_hold_is_refused():
    with refused("argument-not-used", key="training.extra_arguments.hub_token", remedy="HF_TOKEN") as caught:
        config_with("training.extra_arguments.hub_token=hf_abc")
    assert "hf_abc" not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "custom.extra.rollout_server.vllm_engine_kwargs.hf_token",
        "custom.extra.swift.rollout_options.api_key",
        "custom.extra.swift.rlhf_options.hub_token",
    ],
)
def test_a_secret_that_would_stand_in_the_list_of_processes_is_refused(key):
    with refused("secret-on-command-line", key=key, remedy="HF_TOKEN") as caught:
        config_with(f"{key}=hf_abc")
    assert "hf_abc" not in str(caught.value)
    assert config_with(f"{key}=true") is not None


def test_problems_spell_what_would_steer_a_terminal(tmp_path):
    (tmp_path / "run.yaml").write_text(r'"\e[2J\e]0;title\a": 1')
    with pytest.raises(ErrorList) as caught:
        load_config(str(tmp_path / "run.yaml"))
    assert any(error.key == r"\x1b[2J\x1b]0;title\x07" for error in caught.value.errors)


@pytest.mark.parametrize("url", ["ftp://me:word@a:1", "http://me:word@a:x", "me:word@a:1", "http://a:1/?api_key=word"])
def test_problems_hide_the_credentials_of_urls(url):
    with refused("base-url-invalid") as caught:
        config_with(
            "~.rollout_backend=vllm", "~.vllm.mode=server", f"~.vllm.server={{base_url: '{url}', group_port: 1}}"
        )
    assert "***" in str(caught.value)
    assert "word" not in str(caught.value) + repr(caught.value)
