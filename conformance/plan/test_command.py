"""``rollmatch plan`` as it is typed."""

import json

import pytest

from conformance.rollout.digits import ROOT
from rollmatch.cli.main import main

CONFIG = str(ROOT / "fixtures/digits/3v1.yaml")


def test_a_plan_is_a_table_a_choice_and_its_assumptions(capsys):
    assert main(["plan", CONFIG, "--gpus", "4"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("1v3", "2v2", "3v1", "best: ", "assumed:", "learner: weights"))


def test_as_json_everything_is_there(capsys):
    assert main(["plan", CONFIG, "--gpus", "2", "--nodes", "2", "--gpu", "H100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in told["forecasts"]] == ["1v3", "2v2", "3v1"]
    assert told["best"] in ("1v3", "2v2", "3v1")
    assert {"rollout_s", "learn_s", "sync_s", "step_s", "learner", "server"} <= set(told["forecasts"][0])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpus", "1"], "[too-few-gpus] --gpus"),
        (["--gpus", "4", "--gpu", "B200"], "[rates-invalid] --gpu"),
        (["--gpus", "4", "--rates", "/none.yaml"], "[rates-invalid] /none.yaml"),
        (["--gpus", "4", "--set", "model.model=/none"], "[shape-unknown] model.model"),
    ],
)
def test_what_is_wrong_is_told_with_its_key_and_exit_1(arguments, told, capsys):
    assert main(["plan", CONFIG, *arguments]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [[], ["--gpus", "0"], ["--gpus", "4", "--nodes", "-1"]])
def test_wrong_usage_is_exit_2(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", CONFIG, *wrong])
    assert caught.value.code == 2
