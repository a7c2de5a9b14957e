import json

import pytest

from rollmatch.config import json_schema, resolved_yaml
from rollmatch.config.schema import fields
from rollmatch.config.yaml_dialect import parse_mapping

jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def judge():
    jsonschema.Draft7Validator.check_schema(json_schema())
    return jsonschema.Draft7Validator(json_schema())


def test_it_is_plain_json():
    assert json.loads(json.dumps(json_schema())) == json_schema()


def test_a_resolved_tree_is_accepted(judge, make_with):
    judge.validate(parse_mapping(resolved_yaml(make_with()), origin="resolved"))


@pytest.mark.parametrize(
    ("tree", "is_fine"),
    [
        ({}, True),
        ({"extends": "a.yaml"}, True),
        ({"extends": ["a.yaml", "b.yaml"]}, True),
        ({"extends": 3}, False),
        ({"trainig": {}}, False),
        ({"training": {"seed": 3}}, True),
        ({"training": {"seed": "3"}}, False),
        ({"training": {"sead": 3}}, False),
        ({"training": {"report_to": "wandb"}}, True),
        ({"training": {"report_to": ["wandb"]}}, True),
        ({"training": {"report_to": "mlflow"}}, False),
        ({"training": {"max_steps": -1}}, True),
        ({"training": {"max_steps": 0}}, False),
        ({"custom": {"extra": {"rollout_matching": {"rollout_backend": "HF"}}}}, True),
        ({"custom": {"extra": {"rollout_matching": {"rollout_backend": "sglang"}}}}, False),
        ({"custom": {"extra": {"rollout_matching": {"vllm": {"max_model_len": None}}}}}, True),
    ],
)
def test_it_judges_parts_of_trees_as_loading_does(judge, tree, is_fine):
    assert judge.is_valid(tree) is is_fine


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
