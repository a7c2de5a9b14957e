"""The table of models: it is whole, current and honest."""

import json

import pytest

from conformance.doubles.architectures import ARCHITECTURES
from conformance.tools.model_trials import Trials, outcome_of
from conformance.tools.models_table import COLUMNS, PAGE, RESULTS, in_process, render
from conformance.tools.real_models import REAL_MODELS
from rollmatch.errors import ConfigError

AGAIN = "python -m conformance.tools.models_table"
OF_TOKENIZERS = ("text", "joint", "tools")
OF_WEIGHTS = ("loads", "adapter", "freeze", "packed", "grpo", "matching")
WITHOUT_ROW = [name for name, known in ARCHITECTURES.items() if known.processor and name not in REAL_MODELS]


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text())


def test_its_rows_and_columns_are_whole(results):
    assert results["rows"].keys() == REAL_MODELS.keys(), f"try again: {AGAIN}"
    assert all(row.keys() == COLUMNS.keys() for row in results["rows"].values()), f"try again: {AGAIN}"


def test_the_page_is_made_from_the_results(results):
    assert PAGE.read_text() == render(results)


EVERY_DAY = ("qwen3_vl", "gemma3_text", "llama2", "mistral_v3")
"""One of each kind of tokenizer; ``wide`` tests try the others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] * (name not in EVERY_DAY)) for name in REAL_MODELS]
)
def test_what_concerns_its_tokenizers_is_tried_every_time(results, name, tmp_path):
    trials = Trials(name, tmp_path)
    tried = {column: outcome_of(getattr(trials, column)) for column in OF_TOKENIZERS}
    assert tried == {column: results["rows"][name][column] for column in OF_TOKENIZERS}, f"try again: {AGAIN} {name}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gemma3_text", marks=pytest.mark.wide),
        "mistral_v3",
        pytest.param("qwen3_vl", marks=pytest.mark.wide),
    ],
)
def test_what_concerns_weights_is_tried_for_one_of_each_kind_of_tokenizer(results, name, tmp_path):
    trials = Trials(name, tmp_path)
    tried = {column: outcome_of(getattr(trials, column)) for column in OF_WEIGHTS}
    assert tried == {column: results["rows"][name][column] for column in OF_WEIGHTS}, f"try again: {AGAIN} {name}"


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize(("name", "columns"), [("qwen3_moe", ["full"]), ("llama3", ["prompt", "greedy", "stop"])])
def test_what_concerns_engines_is_tried_for_experts_and_for_a_model_of_several_ends(results, name, columns):
    expected = {column: results["rows"][name][column] for column in columns}
    assert in_process(name, columns) == expected, f"try again: {AGAIN} {name}"


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize("name", WITHOUT_ROW)
def test_engines_take_images_and_weights_of_architectures_without_a_row(name):
    columns = ["prompt", "greedy", "full", "packed"]
    assert in_process(name, columns) == dict.fromkeys(columns, "yes")


def test_a_trial_that_raises_anything_else_is_no_refusal():
    def refuse():
        raise ConfigError("no", code="not-so")

    def crash():
        raise AttributeError("merge_size")

    assert outcome_of(lambda: None) == "yes"
    assert outcome_of(refuse) == "refused: not-so"
    assert outcome_of(crash) == "failed: AttributeError: merge_size"
