"""The files of fixtures/config: ``good_*`` load, ``bad_*`` name their faults, ``base_*`` are parts; the JSON schema."""

from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator

from conformance.doubles.configs import config_with
from conformance.doubles.refusals import refused
from rollmatch.config import json_schema, load_config, make, resolved_yaml
from rollmatch.config.schema import fields
from rollmatch.config.yaml_dialect import parse_mapping
from rollmatch.errors import ErrorList

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "fixtures" / "config"
BAD = sorted(FOLDER.glob("bad_*.yaml"))
WHOLE = sorted(set(FOLDER.glob("*.yaml")) - set(BAD) - set(FOLDER.glob("base_*.yaml")))
READABLE_BY_EDITORS = sorted(set(FOLDER.glob("*.yaml")) - set(BAD))
NOT_SEEN_BY_A_SCHEMA = {"extends_cycle", "extends_missing", "key_duplicated", "missing_key", "yaml_malformed"}
"""Files whose fault is no matter of one file's shape."""


def name_of(path):
    return path.stem


def expected_in(path):
    lines = [line.split() for line in path.read_text().splitlines() if line.startswith("# expect:")]
    return sorted((code, key) for _, _, code, key in lines)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", WHOLE, ids=name_of)
def test_every_shipped_yaml_loads(path):
    assert load_config(path).custom.trainer_variant == "rollout_matching_sft"


RECIPES = [*sorted((ROOT / "fixtures/detector").glob("*-?.yaml")), ROOT / "fixtures/detector-8b.yaml"]


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_every_recipe_loads_and_stage_2_starts_from_stage_1(path):
    custom = load_config(path).custom
    assert custom.trainer_variant == ("sft" if path.stem.endswith("-1") else "rollout_matching_sft")
    assert custom.extra.rollout_matching.answer_format in (path.stem[:-2], "qwen3_vl")
    assert load_config(path, ["custom.trainer_variant=sft"]).custom.trainer_variant == "sft"
    if path.stem.endswith("-2"):
        before = load_config(path.with_name(path.name.replace("-2", "-1")))
        assert load_config(path).model.model == before.training.output_dir


@pytest.mark.parametrize("path", BAD, ids=name_of)
def test_all_that_is_wrong_is_reported_at_once_and_a_repaired_twin_loads(path):
    assert FOLDER / path.name.replace("bad_", "good_") in WHOLE
    with pytest.raises(ErrorList) as caught:
        load_config(path.relative_to(ROOT))
    assert sorted((error.code, error.key) for error in caught.value.errors) == expected_in(path)
    assert all(error.problem and error.remedy for error in caught.value.errors)


@pytest.fixture(scope="module")
def validator():
    Draft7Validator.check_schema(json_schema())
    return Draft7Validator(json_schema())


@pytest.mark.parametrize("path", READABLE_BY_EDITORS, ids=name_of)
def test_the_json_schema_accepts_what_loads(validator, path):
    validator.validate(yaml.safe_load(path.read_text().replace("1e-4", "0.0001")))


@pytest.mark.parametrize(
    "path", [path for path in BAD if path.stem.removeprefix("bad_") not in NOT_SEEN_BY_A_SCHEMA], ids=name_of
)
def test_the_json_schema_refuses_what_is_wrong_in_one_file(validator, path):
    assert not validator.is_valid(yaml.safe_load(path.read_text()))


def test_the_json_schema_knows_what_a_file_is_laid_over(validator):
    trees = [{"extends": paths} for paths in ("a", ["a.yaml", "b.yaml"], "", 1)]
    assert [validator.is_valid(tree) for tree in trees] == [True, True, False, False]


def test_the_minimal_file_holds_only_what_is_required():
    tree = yaml.safe_load((FOLDER / "good_minimal.yaml").read_text())
    required, chosen = "this key is required", "is missing"  # the second one may be named in another section
    cases = (("model", "model", required), ("custom", "train_jsonl", chosen), ("training", "output_dir", required))
    for section, key, problem in cases:
        smaller = {**tree, section: {name: value for name, value in tree[section].items() if name != key}}
        with refused("missing-key", f"{section}.{key}", problem=problem):
            make(smaller)


def test_a_resolved_tree_is_accepted(validator):
    validator.validate(parse_mapping(resolved_yaml(config_with()), origin="resolved"))


@pytest.mark.parametrize(
    ("trees", "is_fine"),
    [
        ([{}, {"extends": "a.yaml"}, {"extends": ["a.yaml", "b.yaml"]}], True),
        ([{"extends": 3}, {"trainig": {}}], False),
        ([{"training": values} for values in ({"seed": 3}, {"report_to": "wandb"}, {"report_to": ["wandb"]})], True),
        ([{"training": {"max_steps": -1}}], True),
        ([{"training": values} for values in ({"seed": "3"}, {"sead": 3}, {"max_steps": 0})], False),
        ([{"training": {"report_to": "mlflow"}}], False),
        ([{"custom": {"extra": {"rollout_matching": {"rollout_backend": "HF"}}}}], True),
        ([{"custom": {"extra": {"rollout_matching": {"rollout_backend": "sglang"}}}}], False),
        ([{"custom": {"extra": {"rollout_matching": {"vllm": {"max_model_len": None}}}}}], True),
    ],
)
def test_it_judges_parts_of_trees_as_loading_does(validator, trees, is_fine):
    assert [validator.is_valid(tree) for tree in trees] == [is_fine] * len(trees)


def test_every_key_is_described_for_the_editor():
    schema = json_schema()
    parts = schema["$defs"]

    def is_described(about):
        return bool(
            about.get("description") or parts.get(about.get("$ref", "").rpartition("/")[2], {}).get("description")
        )

    named = {
        name: is_described(about) for part in [schema, *parts.values()] for name, about in part["properties"].items()
    }
    assert [name for name, described in named.items() if not described] == []
    assert named.keys() >= {key.rpartition(".")[2] for key in fields()} | {"extends"}  # items of lists have keys, too
