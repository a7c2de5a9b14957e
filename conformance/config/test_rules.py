import pytest

from rollmatch.config.rules import RULES
from rollmatch.config.schema import fields

BEAM = ("~.rollout_backend=hf", "~.decode_mode=beam", "~.num_beams=4")
BROKEN = [
    ("dora-without-lora", "tuner.use_dora", ["tuner.use_dora=true"], ["tuner.use_dora=true", "tuner.train_type=lora"]),
    (
        "nothing-to-train",
        "tuner.freeze_llm",
        ["tuner={freeze_llm: true, freeze_vit: true, freeze_aligner: true}"],
        ["tuner={freeze_llm: true, freeze_vit: true, freeze_aligner: false}"],
    ),
    ("beam-needs-hf", "~.decode_mode", ["~.decode_mode=beam", "~.num_beams=4"], [*BEAM]),
    ("beams-disagree", "~.num_beams", ["~.num_beams=2"], ["~.num_beams=1"]),
    ("beams-disagree", "~.num_beams", [*BEAM, "~.num_beams=1"], [*BEAM, "~.num_beams=2"]),
    (
        "beam-sampled",
        "~.decoding.temperature",
        [*BEAM, "~.decoding.temperature=0.1"],
        [*BEAM, "~.decoding.temperature=0"],
    ),
    ("response-too-long", "global_max_length", ["~.max_new_tokens=1024"], ["~.max_new_tokens=1023"]),
    ("response-too-long", "~.vllm.max_model_len", ["~.vllm.max_model_len=512"], ["~.vllm.max_model_len=513"]),
    (
        "engine-longer-than-segment",
        "~.vllm.max_model_len",
        ["~.vllm.max_model_len=1025"],
        ["~.vllm.max_model_len=1024"],
    ),
    (
        "coordinates-unsupervised",
        "~.soft_ce_weight",
        ["~.soft_ce_weight=0", "~.w1_weight=0"],
        ["~.soft_ce_weight=0", "~.w1_weight=0", "~.gate_weight=1"],
    ),
    (
        "packing-never-flushes",
        "training.packing_drop_last",
        ["training.packing=true", "training.packing_drop_last=false"],
        ["training.packing=false", "training.packing_drop_last=false"],
    ),
    (
        "argument-has-own-key",
        "training.extra_arguments.bf16",
        ["training.extra_arguments.bf16=true"],
        ["training.extra_arguments.tf32=true"],
    ),
    ("reporter-contradiction", "training.report_to", ["training.report_to=[none, wandb]"], ["training.report_to=none"]),
    (
        "reporter-contradiction",
        "training.report_to",
        ["training.report_to=[wandb, wandb]"],
        ["training.report_to=[wandb]"],
    ),
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
    "packing/a-last-short-row-is-not-promised",
    clauses=[
        "decoding/decoding-is-greedy-unless-told-otherwise#2,3,4",
        "decoding/a-response-leaves-room-for-its-prompt#1,2,3,4",
        "configuration/a-policy-is-trained-whole-or-by-adapters#1,2,3,4",
        "supervision/coordinates-are-learnt-as-distributions-over-bins#2,6",
        "packing/the-waiting-list-is-bounded#4",
    ],
)
@pytest.mark.parametrize(("code", "key", "broken", "_repaired"), BROKEN)
def test_a_broken_rule_is_told(problems_with, code, key, broken, _repaired):
    assert problems_with(*broken) == [(code, key)]


@pytest.mark.scenario(
    "decoding/beam-search-on-hf-is-accepted",
    "decoding/a-limit-that-leaves-room-is-accepted",
    "decoding/an-engine-as-long-as-a-segment-is-accepted",
    "configuration/the-same-section-in-its-place-is-accepted",
    "configuration/dora-with-lora-is-accepted",
    "configuration/a-policy-with-one-free-part-is-accepted",
    "configuration/the-config-without-the-buffer-is-accepted",
    "supervision/one-weight-above-zero-is-accepted",
    "packing/a-packing-config-without-these-keys-is-accepted",
    clauses=[
        "decoding/decoding-is-greedy-unless-told-otherwise#1,3",
        "decoding/a-response-leaves-room-for-its-prompt#1,3",
        "configuration/rollout-matching-is-chosen-by-its-trainer-variant#2",
        "configuration/a-policy-is-trained-whole-or-by-adapters#1,3,4",
    ],
)
@pytest.mark.parametrize(("_code", "_key", "_broken", "repaired"), BROKEN)
def test_the_repaired_tree_is_accepted(make_with, _code, _key, _broken, repaired):
    assert make_with(*repaired).global_max_length == 1024


def test_rules_are_judged_although_other_keys_are_wrong(problems_with):
    assert problems_with("training.seed=x", "tuner.use_dora=true") == [
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
def test_a_rule_that_reads_a_wrong_key_is_not_judged(problems_with, overrides, problem):
    assert problems_with(*overrides) == [problem]


def test_rules_read_keys_that_exist():
    assert {key for rule in RULES for key in rule.reads} <= set(fields())
