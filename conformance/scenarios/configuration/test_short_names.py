"""Short names of sections at the top of a file, of overrides and of a mapping from Python."""

import pytest
from jsonschema import Draft7Validator

from conformance.doubles.configs import VALID, config_with
from conformance.doubles.refusals import refused
from rollmatch.config import json_schema, load_config, make
from rollmatch.config.layers import SHORT, in_full, merge, nested
from rollmatch.config.schema import fields
from rollmatch.config.yaml_dialect import dump


@pytest.mark.scenario(
    "configuration/both-names-are-the-same-section", clauses=["configuration/sections-have-short-names#1"]
)
def test_a_short_section_lies_over_the_long_one_of_its_base(tmp_path):
    long = {"extra": {"rollout_matching": {"max_new_tokens": 64, "num_beams": 1}}}
    (tmp_path / "base.yaml").write_text(dump(merge(VALID, {"custom": long})))
    (tmp_path / "run.yaml").write_text("extends: base.yaml\nrollout: {max_new_tokens: 32}\n")
    rollout = load_config(tmp_path / "run.yaml", ["rollout.repetition_penalty=1.5"]).custom.extra.rollout_matching
    assert (rollout.max_new_tokens, rollout.num_beams, rollout.repetition_penalty) == (32, 1, 1.5)


@pytest.mark.scenario(
    "configuration/one-file-with-both-names-is-refused", clauses=["configuration/sections-have-short-names#2"]
)
def test_a_file_with_both_names_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("grpo: {beta: 0.1}\ncustom: {extra: {grpo: {num_generations: 4}}}\n")
    with refused("key-duplicated", "grpo", problem="custom.extra.grpo") as caught:
        load_config(path)
    assert str(path) in caught.value.errors[0].problem
    with refused("key-duplicated", "grpo"):
        nested({"grpo.beta": 0.1, "custom.extra.grpo.num_generations": 4})


@pytest.mark.parametrize("short", SHORT)
def test_each_name_stands_for_a_section_that_editors_know(short):
    assert SHORT[short] in fields()
    check = Draft7Validator(json_schema())
    assert check.is_valid({short: {}})
    assert not check.is_valid({short: {"colour": "red"}})


def test_what_is_wrong_in_a_short_section_is_named_in_full():
    with refused("wrong-type", "custom.extra.rollout_matching"):
        make(in_full(merge(VALID, {"rollout": 5}), origin="a.yaml"))
    with refused("unknown-key", "grop", remedy="grpo"):
        make(merge(VALID, {"grop": {}}))


@pytest.mark.scenario(
    "decoding/completions-are-sampled-by-default", clauses=["decoding/sampling-is-configured-under-decoding#3"]
)
@pytest.mark.parametrize(
    ("variant", "set_to", "temperature"),
    [
        ("grpo", None, 1.0),
        ("vineppo_mcts", None, 1.0),
        ("grpo", 0.7, 0.7),
        ("rollout_matching_sft", None, 0.0),
        ("rollout_matching_sft", 0.7, 0.7),
    ],
)
def test_variants_that_learn_from_completions_sample_unless_a_temperature_is_set(variant, set_to, temperature):
    given = () if set_to is None else (f"rollout.decoding.temperature={set_to}",)
    config = config_with(f"custom.trainer_variant={variant}", "grpo.rewards=[{function: builtins:len}]", *given)
    decoding = config.custom.extra.rollout_matching.decoding
    assert (decoding.temperature, decoding.top_p, decoding.top_k) == (temperature, 1.0, -1)
    assert make(config.model_dump(mode="json", exclude_defaults=True)) == config
