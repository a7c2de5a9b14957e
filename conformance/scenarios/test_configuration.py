"""Capability ``configuration``, scenario by scenario."""

import pytest

from conformance.scenarios.configs import VALID, config_with, not_refused, problem_of, problems_of, refusal_of
from rollmatch.config import load_config
from rollmatch.config.yaml_dialect import dump, parse_mapping
from rollmatch.errors import ErrorList


@pytest.fixture
def write(tmp_path):
    """Writes a tree, below a valid one unless told otherwise, and returns its path."""

    def write_file(name, tree, *, whole=False):
        path = tmp_path / name
        path.write_text(dump({**VALID, **tree} if whole else tree))
        return path

    return write_file


def with_training(**keys):
    return {**VALID, "training": {**VALID["training"], **keys}}


def codes_of(path):
    with pytest.raises(ErrorList) as caught:
        load_config(path)
    return [(error.code, error.problem) for error in caught.value.errors]


@pytest.mark.scenario(
    "configuration/a-file-overrides-one-key-of-its-base",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#1,2,3,7"],
)
def test_a_file_overrides_one_key_of_its_base(write):
    write("base.yaml", with_training(seed=1, max_steps=10))
    with not_refused():
        training = load_config(write("run.yaml", {"extends": "base.yaml", "training": {"seed": 2}})).training
    assert (training.seed, training.max_steps) == (2, 10)


@pytest.mark.scenario(
    "configuration/a-list-of-the-extending-file-replaces-the-list-below-it",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#2,3"],
)
def test_a_list_of_the_extending_file_replaces_the_list_below_it(write):
    write("base.yaml", with_training(report_to=["tensorboard", "wandb"]))
    run = write("run.yaml", {"extends": ["base.yaml"], "training": {"report_to": ["none"]}})
    with not_refused():
        assert load_config(run).training.report_to == ("none",)


@pytest.mark.scenario(
    "configuration/files-that-extend-each-other-are-refused",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#5"],
)
def test_files_that_extend_each_other_are_refused(write):
    write("b.yaml", {"extends": "a.yaml"})
    told = codes_of(write("a.yaml", {"extends": "b.yaml"}))
    assert [code for code, _ in told] == ["extends-cycle"]
    assert all(name in told[0][1] for name in ("a.yaml", "b.yaml"))
    write("b.yaml", {})
    assert load_config(write("a.yaml", {**VALID, "extends": "b.yaml"})).global_max_length == 1024


@pytest.mark.scenario(
    "configuration/two-bases-may-share-a-base",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#4,6"],
)
def test_two_bases_may_share_a_base(write):
    write("root.yaml", VALID)
    for name, seed in (("left.yaml", 3), ("right.yaml", 4)):
        write(name, {"extends": "root.yaml", "training": {"seed": seed}})
    with not_refused():
        config = load_config(write("run.yaml", {"extends": ["left.yaml", "right.yaml"]}))
    assert config.training.seed == 4


@pytest.mark.scenario(
    "configuration/a-misspelt-key-is-refused-with-the-right-spelling",
    clauses=["configuration/unknown-keys-are-refused#1,2"],
)
def test_a_misspelt_key_is_refused_with_the_right_spelling():
    problem = problem_of("training.packing_bufer=512")
    assert (problem.code, problem.key) == ("unknown-key", "training.packing_bufer")
    assert "training.packing_buffer" in problem.remedy


@pytest.mark.scenario("configuration/the-right-spelling-is-accepted")
def test_the_right_spelling_is_accepted():
    with not_refused():
        config = config_with("training.packing_buffer=512")
    assert config.training.packing_buffer == 512


@pytest.mark.scenario(clauses=["configuration/unknown-keys-are-refused#3"])
def test_a_mapping_that_holds_one_key_twice_is_refused():
    with pytest.raises(ErrorList) as caught:
        parse_mapping("training: {seed: 1, seed: 2}", origin="run.yaml")
    assert [error.code for error in caught.value.errors] == ["key-duplicated"]
    assert parse_mapping("training: {seed: 2}", origin="run.yaml") == {"training": {"seed": 2}}


@pytest.mark.scenario(
    "configuration/three-mistakes-give-three-problems",
    clauses=["configuration/all-problems-of-a-config-are-told-at-once#1,2,4"],
)
def test_three_mistakes_give_three_problems():
    problems = problems_of("training.seed='7'", "training.packing_min_fill_ratio=0", "training.colour=red")
    assert [(problem.code, problem.key) for problem in problems] == [
        ("unknown-key", "training.colour"),
        ("out-of-range", "training.packing_min_fill_ratio"),
        ("wrong-type", "training.seed"),
    ]
    assert all(problem.problem and problem.remedy for problem in problems)
    assert config_with("training.seed=7", "training.packing_min_fill_ratio=0.1").training.seed == 7


@pytest.mark.scenario(
    "configuration/an-unknown-trainer-variant-is-refused",
    clauses=["configuration/rollout-matching-is-chosen-by-its-trainer-variant#1,2"],
)
def test_an_unknown_trainer_variant_is_refused():
    assert refusal_of("custom.trainer_variant=rollout_matching") == ("not-a-choice", "custom.trainer_variant")
    assert config_with("custom.trainer_variant=rollout_matching_sft").custom.extra.rollout_matching


@pytest.mark.scenario(
    "configuration/a-section-at-the-top-level-is-refused",
    clauses=["configuration/rollout-matching-is-chosen-by-its-trainer-variant#3"],
)
def test_a_section_at_the_top_level_is_refused():
    problem = problem_of("rollout_matching={max_new_tokens: 64}")
    assert (problem.code, problem.key) == ("removed-key", "rollout_matching")
    assert "custom.extra.rollout_matching" in problem.remedy
    assert config_with("~.max_new_tokens=64").custom.extra.rollout_matching.max_new_tokens == 64


@pytest.mark.scenario(
    "configuration/dora-without-lora-is-refused", clauses=["configuration/a-policy-is-trained-whole-or-by-adapters#1,2"]
)
def test_dora_without_lora_is_refused():
    assert refusal_of("tuner={train_type: full, use_dora: true}") == ("dora-without-lora", "tuner.use_dora")


@pytest.mark.scenario(
    "configuration/dora-with-lora-is-accepted", clauses=["configuration/a-policy-is-trained-whole-or-by-adapters#1"]
)
def test_dora_with_lora_is_accepted():
    with not_refused():
        tuner = config_with("tuner={train_type: lora, use_dora: true}").tuner
    assert (tuner.train_type, tuner.use_dora) == ("lora", True)


@pytest.mark.scenario(clauses=["configuration/a-policy-is-trained-whole-or-by-adapters#3,4"])
def test_a_config_that_freezes_everything_is_refused():
    parts = ("freeze_llm", "freeze_vit", "freeze_aligner")
    assert refusal_of(*(f"tuner.{part}=true" for part in parts)) == ("nothing-to-train", "tuner.freeze_llm")
    for left in parts:
        tuner = config_with(*(f"tuner.{part}=true" for part in parts if part != left)).tuner
        assert [getattr(tuner, part) for part in parts] == [part != left for part in parts]


@pytest.mark.scenario(
    "configuration/a-buffer-that-is-switched-off-is-refused-too",
    clauses=["configuration/a-rollout-buffer-is-refused#1,2"],
)
def test_a_buffer_that_is_switched_off_is_refused_too():
    problem = problem_of("~.rollout_buffer={enabled: false}")
    assert (problem.code, problem.key) == ("removed-key", "custom.extra.rollout_matching.rollout_buffer")
    assert "asynchronous prefetch" in problem.remedy
    assert refusal_of("~.rollout_buffer=null") == (problem.code, problem.key)


@pytest.mark.scenario("configuration/the-config-without-the-buffer-is-accepted")
def test_the_config_without_the_buffer_is_accepted():
    with not_refused():
        config = config_with()
    assert "rollout_buffer" not in config.custom.extra.rollout_matching.model_dump()


@pytest.mark.scenario(
    "configuration/an-explicit-null-replaces-the-value-below-it",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#3"],
)
def test_an_explicit_null_replaces_the_value_below_it(write):
    write("base.yaml", with_training(save_total_limit=3))
    run = load_config(write("run.yaml", {"extends": "base.yaml", "training": {"save_total_limit": None}}))
    assert run.training.save_total_limit is None


@pytest.mark.scenario(
    "configuration/the-command-line-sets-a-key-of-the-file",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#7"],
)
def test_the_command_line_sets_a_key_of_the_file(write):
    told = load_config(write("run.yaml", with_training(seed=1)), ["training.seed=7"])
    assert told == load_config(write("other.yaml", with_training(seed=7)))
    assert told.training.seed == 7


@pytest.mark.scenario(
    "configuration/a-key-that-is-written-twice-is-refused", clauses=["configuration/unknown-keys-are-refused#3"]
)
def test_a_key_that_is_written_twice_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(dump(VALID).replace("training:\n", "training:\n  seed: 1\n  seed: 2\n"))
    with pytest.raises(ErrorList) as caught:
        load_config(path)
    assert [(error.code, error.key) for error in caught.value.errors] == [("key-duplicated", "training.seed")]
    line = path.read_text().split("\n").index("  seed: 1") + 1
    assert all(str(number) in caught.value.errors[0].problem for number in (line, line + 1))


@pytest.mark.scenario(
    "configuration/the-right-trainer-variant-is-accepted",
    clauses=["configuration/rollout-matching-is-chosen-by-its-trainer-variant#1"],
)
def test_the_right_trainer_variant_is_accepted():
    with not_refused():
        assert config_with("custom.trainer_variant=rollout_matching_sft").custom.trainer_variant


@pytest.mark.scenario(
    "configuration/the-same-section-in-its-place-is-accepted",
    clauses=["configuration/rollout-matching-is-chosen-by-its-trainer-variant#2"],
)
def test_the_same_section_in_its_place_is_accepted():
    with not_refused():
        config = config_with("custom.extra.rollout_matching={max_new_tokens: 64}")
    assert config.custom.extra.rollout_matching.max_new_tokens == 64


@pytest.mark.scenario("configuration/a-policy-that-is-frozen-as-a-whole-is-refused")
def test_a_policy_that_is_frozen_as_a_whole_is_refused():
    refused = refusal_of("tuner={freeze_vit: true, freeze_aligner: true, freeze_llm: true}")
    assert refused == ("nothing-to-train", "tuner.freeze_llm")


@pytest.mark.scenario("configuration/a-policy-with-one-free-part-is-accepted")
def test_a_policy_with_one_free_part_is_accepted():
    with not_refused():
        tuner = config_with("tuner={freeze_vit: true, freeze_aligner: true, freeze_llm: false}").tuner
    assert (tuner.freeze_vit, tuner.freeze_aligner, tuner.freeze_llm) == (True, True, False)
