"""The files of fixtures/config: ``good_*`` load, ``bad_*`` say in their head what is wrong, ``base_*`` are parts."""

from pathlib import Path

import pytest
import yaml

from rollmatch.config import json_schema, load_config, make
from rollmatch.errors import ErrorList

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("path", BAD, ids=name_of)
def test_all_that_is_wrong_is_told_at_once(path):
    with pytest.raises(ErrorList) as caught:
        load_config(path.relative_to(ROOT))
    assert sorted((error.code, error.key) for error in caught.value.errors) == expected_in(path)
    assert all(error.problem and error.remedy for error in caught.value.errors)


@pytest.mark.parametrize("path", BAD, ids=name_of)
def test_each_bad_file_has_a_repaired_twin(path):
    assert FOLDER / path.name.replace("bad_", "good_") in WHOLE


@pytest.fixture(scope="module")
def validator():
    return pytest.importorskip("jsonschema").Draft7Validator(json_schema())


@pytest.mark.parametrize("path", READABLE_BY_EDITORS, ids=name_of)
def test_the_json_schema_accepts_what_loads(validator, path):
    validator.validate(yaml.safe_load(path.read_text().replace("1e-4", "0.0001")))


@pytest.mark.parametrize(
    "path", [path for path in BAD if path.stem.removeprefix("bad_") not in NOT_SEEN_BY_A_SCHEMA], ids=name_of
)
def test_the_json_schema_refuses_what_is_wrong_in_one_file(validator, path):
    assert not validator.is_valid(yaml.safe_load(path.read_text()))


def test_the_minimal_file_holds_only_what_is_required():
    tree = yaml.safe_load((FOLDER / "good_minimal.yaml").read_text())
    for section, key in (("model", "model"), ("custom", "train_jsonl"), ("training", "output_dir")):
        smaller = {**tree, section: {name: value for name, value in tree[section].items() if name != key}}
        with pytest.raises(ErrorList) as caught:
            make(smaller)
        assert [(error.code, error.key) for error in caught.value.errors] == [("missing-key", f"{section}.{key}")]
