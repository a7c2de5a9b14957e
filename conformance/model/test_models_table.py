"""The table of architectures is whole, current and honest."""

import json
from importlib.metadata import version

import pytest

from conformance.doubles.architectures import ARCHITECTURES
from conformance.harness.models_table import COLUMNS, PACKAGES, PAGE, RESULTS, in_process, outcome_of, render
from rollmatch.errors import ConfigError

AGAIN = "python -m conformance.harness.models_table"


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text())


def test_its_rows_and_columns_are_known(results):
    assert results["rows"].keys() <= ARCHITECTURES.keys(), f"try again: {AGAIN}"
    assert all(row.keys() <= COLUMNS.keys() for row in results["rows"].values())
    assert all(known.model in PAGE.read_text() for known in ARCHITECTURES.values())


def test_it_was_tried_with_the_installed_packages(results):
    assert results["versions"] == {name: version(name) for name in PACKAGES}, f"try again: {AGAIN}"


def test_the_page_is_made_from_the_results(results):
    assert PAGE.read_text() == render(results)


@pytest.mark.engine
def test_experts_of_an_engine_take_the_weights_of_a_sync():
    assert in_process("qwen3_moe", ["full"]) == {"full": "yes"}


def test_a_trial_that_raises_anything_else_is_no_refusal():
    def refuse():
        raise ConfigError("no", code="not-so")

    def crash():
        raise AttributeError("merge_size")

    assert outcome_of(lambda: None) == "yes"
    assert outcome_of(refuse) == "refused: not-so"
    assert outcome_of(crash) == "failed: AttributeError: merge_size"
