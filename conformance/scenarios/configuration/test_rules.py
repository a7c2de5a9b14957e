import dataclasses

import pytest
from transformers import TrainingArguments

from conformance.doubles.configs import GRPO, config_with, rejected
from conformance.doubles.refusals import refused
from rollmatch.config.rollout_matching import ANSWER_FORMATS
from rollmatch.config.rules import RULES
from rollmatch.config.schema import fields
from rollmatch.config.training import NOT_USED

BEAM = ("~.rollout_backend=hf", "~.decode_mode=beam", "~.num_beams=4")


def values(code, key, bad, good, *others):
    """A wrong value of a key beside others, and a right one."""
    return code, key, (*others, f"{key}={bad}"), (*others, f"{key}={good}")


FROZEN = "tuner={freeze_llm: true, freeze_vit: true, freeze_aligner: "
WEIGHTLESS = ("~.soft_ce_weight=0", "~.w1_weight=0")
EXTRA, STOPPING = "training.extra_arguments", "training.early_stopping={metric: f1}"
TOKENS = "training.tokens_per_micro_batch"
SHARED = "training.share_prompts=true"
ROW = f"{TOKENS}=1024"
BESIDE = "tuner.modules_to_save=[lm_head]"
ALONE = ["tuner.train_type=lora", "~.rollout_backend=vllm", "~.vllm.enable_lora=true", "~.vllm.sync.mode=adapter"]
SERVED = ("~.vllm.mode=server", "~.vllm.server.base_url=http://h:1", "~.vllm.server.group_port=2")
ENGINE_LENGTH = "custom.extra.rollout_server.vllm_max_model_len"
CONTINUED = ("tuner.train_type=lora", "model.adapter=runs/a", "model.adapter_start=continue")
BROKEN = [
    ("dora-without-lora", "tuner.use_dora", ["tuner.use_dora=true"], ["tuner.use_dora=true", "tuner.train_type=lora"]),
    ("nothing-to-train", "tuner.freeze_llm", [f"{FROZEN}true}}"], [f"{FROZEN}false}}"]),
    ("beam-needs-hf", "~.decode_mode", BEAM[1:], BEAM),
    ("coordinates-unsupervised", "~.soft_ce_weight", WEIGHTLESS, [*WEIGHTLESS, "~.gate_weight=1"]),
    ("coordinates-unsupervised", "~.soft_ce_weight", WEIGHTLESS, WEIGHTLESS[:1]),
    ("coordinates-unsupervised", "~.soft_ce_weight", WEIGHTLESS, WEIGHTLESS[1:]),
    ("argument-has-own-key", f"{EXTRA}.bf16", [f"{EXTRA}.bf16=true"], [f"{EXTRA}.tf32=true"]),
    values("beams-disagree", "~.num_beams", 2, 1),
    values("beams-disagree", "~.num_beams", 1, 2, *BEAM),
    values("beam-sampled", "~.decoding.temperature", 0.1, 0, *BEAM),
    ("response-too-long", "global_max_length", ["~.max_new_tokens=1024"], ["~.max_new_tokens=1023"]),
    values("response-too-long", "~.vllm.max_model_len", 512, 513),
    values("engine-longer-than-segment", "~.vllm.max_model_len", 1025, 1024),
    values("answer-format-unknown", "~.answer_format", "yolo", "qwen3_vl"),
    values("coordinate-loss-unused", "~.target_sigma", 1.5, 2.0, "~.answer_format=integers"),
    values("micro-batch-below-segment", TOKENS, 1023, 1024),
    values("micro-batch-twice", "training.packing", "true", "false", ROW),
    values("micro-batch-twice", "training.padding_free", "false", "true", ROW),
    values("micro-batch-twice", "training.gradient_accumulation_steps", 2, 1, ROW),
    values("prompts-not-shared", "training.share_prompts", "true", "auto"),
    values(
        "prompts-not-shared", "training.share_prompts", "true", "false", "training.packing=true", "model.attn_impl=sdpa"
    ),
    ("prompts-not-shared", "training.share_prompts", [SHARED], [SHARED, "training.padding_free=true"]),
    values("padding-free-attention", TOKENS, 1024, "null", "model.attn_impl=sdpa"),
    values("padding-free-attention", "training.padding_free", "true", "false", "model.attn_impl=sdpa"),
    values("adapter-option-without-lora", "tuner.use_rslora", "true", "false"),
    values("adapter-option-without-lora", "tuner.lora_rank", 64, 8),
    values("adapter-option-without-lora", "tuner.target_regex", ".*q_proj", "null"),
    values("adapter-option-without-lora", "model.adapter_start", "continue", "merge"),
    values("adapter-option-without-lora", "~.vllm.sync.mode", "adapter", "full", "~.vllm.enable_lora=true"),
    values(
        "engine-shorter-than-segment",
        ENGINE_LENGTH,
        511,
        512,
        *SERVED,
        "~.max_new_tokens=64",
        "~.vllm.max_model_len=512",
    ),
    values("adapter-option-not-used", "tuner.lora_dropout", 0.1, 0, *CONTINUED),
    values("adapter-option-not-used", "tuner.freeze_vit", "true", "false", *CONTINUED),
    ("adapter-option-without-lora", "tuner.modules_to_save", [BESIDE], [BESIDE, "tuner.train_type=lora"]),
    ("adapter-incomplete", "tuner.modules_to_save", [BESIDE, *ALONE], [BESIDE, *ALONE[:-1]]),
    values("micro-batch-strategy", "training.strategy", "deepspeed_zero2", "fsdp2", ROW),
    ("early-stopping-blind", "training.early_stopping", [STOPPING], [STOPPING, "training.eval_steps=1"]),
    *(
        ("argument-has-own-key", f"{EXTRA}.{name}", [STOPPING, "training.eval_steps=1", f"{EXTRA}.{name}=f1"], ())
        for name in ("metric_for_best_model", "greater_is_better")
    ),
    values("reporter-contradiction", "training.report_to", "[none, wandb]", "none"),
    values("reporter-contradiction", "training.report_to", "[wandb, wandb]", "[wandb]"),
]


@pytest.mark.scenario(
    "decoding/beam-search-on-vllm-is-refused",
    "decoding/a-limit-that-leaves-no-room-is-refused",
    "decoding/beam-search-with-one-beam-is-refused",
    "decoding/sampled-beams-are-refused",
    "decoding/an-engine-that-outgrows-a-segment-is-refused",
    "decoding/an-engine-without-room-for-a-prompt-is-refused",
    "configuration/dora-without-lora-is-refused",
    "configuration/a-policy-that-is-frozen-as-a-whole-is-refused",
    "supervision/all-coordinate-weights-at-zero-are-refused",
    "packing/a-micro-batch-that-a-segment-may-not-fit-is-refused",
    "packing/a-micro-batch-of-one-longest-segment-is-accepted",
    "decoding/beam-search-on-hf-is-accepted",
    "decoding/a-limit-that-leaves-room-is-accepted",
    "decoding/an-engine-as-long-as-a-segment-is-accepted",
    "configuration/the-same-section-in-its-place-is-accepted",
    "configuration/dora-with-lora-is-accepted",
    "configuration/a-policy-with-one-free-part-is-accepted",
    "configuration/the-config-without-the-buffer-is-accepted",
    "supervision/one-weight-above-zero-is-accepted",
    "packing/a-packing-config-without-these-keys-is-accepted",
    "parsing/an-unknown-answer-format-is-refused",
    "parsing/a-known-answer-format-is-accepted",
    "parsing/a-coordinate-loss-without-coordinate-tokens-is-refused",
    "parsing/integers-without-a-coordinate-loss-are-accepted",
    clauses=[
        "parsing/the-answer-format-decides-how-objects-are-written#8,9",
        "decoding/decoding-is-greedy-by-default#1,2,3,4",
        "decoding/a-response-leaves-room-for-its-prompt#1,2,3,4",
        "configuration/a-policy-is-trained-whole-or-by-adapters#1,2,3,4,6",
        "supervision/coordinates-are-learnt-as-distributions-over-bins#2,6",
        "packing/the-number-of-passes-may-follow-from-the-tokens#6,7,8",
        "configuration/rollout-matching-is-chosen-by-its-trainer-variant#2",
    ],
)
@pytest.mark.parametrize(("code", "key", "broken", "repaired"), BROKEN)
def test_a_broken_rule_is_refused_and_its_repair_accepted(code, key, broken, repaired):
    assert rejected(*broken) == [(code, key)]
    assert config_with(*repaired).global_max_length == 1024


def test_each_answer_format_brings_its_own_question_unless_one_is_set():
    asked = {name: config_with(f"~.answer_format={name}").custom.prompts for name in ANSWER_FORMATS}
    assert len({prompts.user for prompts in asked.values()}) == 3
    assert "coordinate token" in asked["coord_tokens"].user
    assert "token" not in asked["integers"].user
    assert asked["qwen3_vl"].system == asked["qwen2_5_vl"].system == ""
    own = config_with("~.answer_format=qwen3_vl", "custom.prompts.user=Where?").custom.prompts
    assert (own.system, own.user) == ("", "Where?")


def test_a_variant_with_rewards_has_no_system_message_unless_one_is_set():
    assert config_with(*GRPO).custom.chat_system == ""
    assert config_with(*GRPO, "custom.prompts.system=Be brief.").custom.chat_system == "Be brief."
    assert "JSON" in config_with().custom.prompts.system


def test_rules_are_judged_although_other_keys_are_wrong():
    assert rejected("training.seed=x", "tuner.use_dora=true") == [
        ("wrong-type", "training.seed"),
        ("dora-without-lora", "tuner.use_dora"),
    ]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["~.num_beams=two", "~.rollout_backend=hf", "~.decode_mode=beam"], ("wrong-type", "~.num_beams")),
        (["~.num_beam=2", "~.rollout_backend=hf", "~.decode_mode=beam"], ("unknown-key", "~.num_beam")),
        (["~.max_new_tokens=2000", "global_max_length=long"], ("wrong-type", "global_max_length")),
        (["training.extra_arguments=[bf16]"], ("wrong-type", "training.extra_arguments")),
    ],
)
def test_a_rule_that_reads_a_wrong_key_is_not_judged(overrides, problem):
    assert rejected(*overrides) == [problem]


def test_arguments_of_transformers_that_nothing_here_reads_are_refused():
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert known >= NOT_USED
    for name in NOT_USED:
        key = f"training.extra_arguments.{name}"
        assert rejected(f"{key}=1") == [("argument-not-used", key)]


def test_rules_read_keys_that_exist():
    assert {key for rule in RULES for key in rule.reads} <= set(fields())


def test_a_rule_of_two_keys_is_judged_where_both_can_be_read():
    wrong, short = "wrong-type", ("response-too-long", "global_max_length")
    too_long = ("engine-longer-than-segment", "~.vllm.max_model_len")
    found = rejected("~.max_new_tokens=x", "global_max_length=100", "~.vllm.max_model_len=101")
    assert found == [(wrong, "~.max_new_tokens"), too_long]
    found = rejected("~.vllm.max_model_len=x", "global_max_length=100", "~.max_new_tokens=512")
    assert found == [(wrong, "~.vllm.max_model_len"), short]


def test_a_step_of_several_micro_batches_is_shown_as_one_of_as_many_samples():
    parts = ("training.gradient_accumulation_steps=4", "training.per_device_train_batch_size=3")
    with refused("micro-batch-twice", remedy="per_device_train_batch_size to 12 "):
        config_with(ROW, *parts)


OF_HUB = ("custom.train_jsonl=null", "custom.val_jsonl=null", "custom.dataset.source=cppe-5")
DATASET, BOX, EVAL_SCENES = "custom.dataset", "custom.dataset.box=xywh", "training.eval_scenes"


@pytest.mark.parametrize(
    ("overrides", "problems"),
    [
        (OF_HUB, [("missing-key", f"{DATASET}.box")]),
        ((*OF_HUB, *GRPO), [("missing-key", f"{DATASET}.columns.prompt")]),
        ((*OF_HUB, *GRPO, BOX), []),
        ((*OF_HUB, BOX), []),
        ((*OF_HUB, f"{DATASET}.columns={{prompt: q}}"), [("question-not-used", f"{DATASET}.columns.prompt")]),
        ((*OF_HUB, f"{DATASET}.columns={{messages: m}}"), [("question-not-used", f"{DATASET}.columns.messages")]),
        ((*GRPO, *OF_HUB, f"{DATASET}.columns={{messages: m}}"), []),
        ((*OF_HUB, BOX, f"{DATASET}.streaming=true"), [("missing-key", f"{DATASET}.take")]),
        ((*OF_HUB, BOX, f"{DATASET}.streaming=true", f"{DATASET}.take=9"), []),
        ((OF_HUB[0], OF_HUB[2], BOX), [("two-data-sets", "custom.val_jsonl")]),
        ((OF_HUB[0],), [("missing-key", "custom.train_jsonl")]),
        ((OF_HUB[1],), []),
        ((OF_HUB[1], "training.eval_steps=5"), [("nothing-to-evaluate", "training.eval_steps")]),
        (
            (*OF_HUB, BOX, f"{DATASET}.val=null", "training.eval_steps=5"),
            [("nothing-to-evaluate", "training.eval_steps")],
        ),
    ],
)
def test_a_data_set_is_named_once_and_says_what_its_columns_are(overrides, problems):
    if problems:
        assert rejected(*overrides) == problems
    else:
        config_with(*overrides)
