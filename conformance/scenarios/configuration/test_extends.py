"""Layers of a configuration: files that extend each other, and overrides of the command line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.refusals import refused
from rollmatch.config import load_config
from rollmatch.config.layers import merge, parse_overrides, read_tree
from rollmatch.errors import ErrorList

FOLDER = Path(__file__).parents[3] / "fixtures" / "config"
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)
TREES = st.recursive(
    st.dictionaries(st.sampled_from("abc"), SCALARS, max_size=3),
    lambda below: st.dictionaries(st.sampled_from("abc"), SCALARS | below, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def leaves(tree, path=()):
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


@pytest.mark.scenario(
    "configuration/a-file-overrides-one-key-of-its-base",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#1,2,3,7"],
)
def test_one_base_as_a_text_is_laid_under_the_file():
    config = load_config(FOLDER / "good_extends_text.yaml")
    assert (config.training.seed, config.training.learning_rate) == (2, 1e-4)


@pytest.mark.scenario(
    "configuration/two-bases-may-share-a-base",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#4,6"],
)
def test_a_diamond_is_legal_and_the_last_base_wins():
    training = load_config(FOLDER / "good_diamond.yaml").training
    assert (training.seed, training.learning_rate, training.weight_decay) == (1, 1e-4, 0.1)


@pytest.mark.scenario(
    "configuration/a-list-of-the-extending-file-replaces-the-list-below-it",
    "configuration/an-explicit-null-replaces-the-value-below-it",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#2,3"],
)
def test_mappings_merge_while_lists_and_null_replace():
    config = load_config(FOLDER / "good_deep_merge.yaml")
    rollout = config.custom.extra.rollout_matching
    assert (rollout.max_new_tokens, rollout.decoding.temperature) == (256, 0.7)
    assert rollout.vllm.limit_mm_per_prompt is None
    assert config.training.report_to == ("none",)
    assert load_config(FOLDER / "good_extends_missing.yaml").training.report_to == ("tensorboard", "wandb")


@pytest.mark.scenario(
    "configuration/files-that-extend-each-other-are-refused",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#5"],
)
def test_a_cycle_names_the_whole_chain(write):
    write("two.yaml", "extends: three.yaml\n")
    write("three.yaml", "extends: [two.yaml]\n")
    with refused("extends-cycle", "extends") as caught:
        read_tree(write("one.yaml", "extends: two.yaml\n"))
    problem = caught.value.errors[0].problem
    assert problem.rindex("two.yaml") > problem.index("three.yaml") > problem.index("two.yaml")
    assert "one.yaml" not in problem


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("./one.yaml", "extends-cycle"),
        ("gone.yaml", "config-file-missing"),
        *((wrong, "extends-malformed") for wrong in ("3", "null", "[a.yaml, 3]", "''", "{a: b}", '"b\\0.yaml"')),
    ],
)
def test_extends_is_a_path_or_a_list_of_paths_of_other_files(write, value, code):
    path = write("one.yaml", f"extends: {value}\na: 1\n")
    with refused(code, "extends", problem=str(path)):
        read_tree(path)
    assert read_tree(write("one.yaml", "extends: []\na: 1\n")) == {"a": 1}


def test_paths_start_at_the_file_that_holds_them(write, monkeypatch, tmp_path):
    write("deep/leaf.yaml", "a: 1\n")
    write("deep/middle.yaml", "extends: leaf.yaml\nb: 2\n")
    top = write("top.yaml", "extends: deep/middle.yaml\n")
    monkeypatch.chdir(tmp_path / "deep")
    assert read_tree(top) == {"a": 1, "b": 2}


@pytest.mark.parametrize("name", ["", "none.yaml", "latin.yaml"])
def test_a_missing_file_a_directory_and_another_encoding_are_refused(tmp_path, name):
    path = tmp_path / "latin.yaml"
    path.write_bytes("a: caf\u00e9\n".encode("latin-1"))
    with refused("config-file-missing", str(tmp_path / name)):
        read_tree(tmp_path / name)
    path.write_text("a: caf\u00e9\n", encoding="utf-8")
    assert read_tree(path) == {"a": "caf\u00e9"}


def test_problems_of_several_files_are_reported_together(write):
    write("two.yaml", "a: 1\na: 2\n")
    with pytest.raises(ErrorList) as caught:
        read_tree(write("one.yaml", "extends: [two.yaml, gone.yaml, two.yaml]\n"))
    found = [(error.code, error.key) for error in caught.value.errors]
    assert found == [("key-duplicated", "a"), ("config-file-missing", "extends")]


@given(under=TREES, over=TREES)
def test_every_leaf_of_the_upper_tree_survives_and_inputs_stay(under, over):
    before = (repr(under), repr(over))
    merged = dict(leaves(merge(under, over)))
    for path, value in leaves(over):
        assert value == {} or merged[path] == value
    assert (repr(under), repr(over)) == before


@given(tree=TREES)
def test_merging_with_nothing_or_itself_changes_nothing(tree):
    assert merge(tree, {}) == merge({}, tree) == merge(tree, tree) == tree


MINIMAL = Path(__file__).parents[3] / "fixtures" / "config" / "good_deep_merge.yaml"


@pytest.mark.scenario(
    "configuration/the-command-line-sets-a-key-of-the-file",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#7"],
)
def test_an_override_beats_the_file_and_leaves_its_neighbours():
    config = load_config(MINIMAL, ["custom.extra.rollout_matching.decoding.top_p=0.5", "training.seed=7"])
    decoding = config.custom.extra.rollout_matching.decoding
    assert (decoding.temperature, decoding.top_p, config.training.seed) == (0.7, 0.5, 7)


def test_later_overrides_beat_earlier_ones():
    assert parse_overrides(["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("null", None), ("", None), ("[1, a]", [1, "a"]), ("{b: 1}", {"b": 1})),
        *(("'7'", "7"), ("x=y", "x=y"), ("1e-3", 0.001)),
    ],
)
def test_values_are_yaml(text, value):
    assert parse_overrides([f"a={text}"]) == {"a": value}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        *(("training.seed", "training.seed"), ("=1", ""), ("a..b=1", "a..b")),
        *(("a.=1", "a."), ("a=[1", "a"), ("extends=x", "extends")),
        *((f"a={value}", "a") for value in ("!!int abc", "9" * 5000, "[" * 5000, "!own x")),
    ],
)
def test_a_malformed_override_is_refused(override, key):
    with refused("override-malformed", key):
        parse_overrides([override, "a.b=1"])


def test_bad_overrides_and_a_bad_file_are_reported_together(tmp_path):
    with pytest.raises(ErrorList) as caught:
        load_config(tmp_path / "none.yaml", ["nonsense", "extends=x"])
    codes = [error.code for error in caught.value.errors]
    assert codes == ["config-file-missing", "override-malformed", "override-malformed"]
