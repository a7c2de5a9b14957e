from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmatch.config import load_config
from rollmatch.config.layers import merge, read_tree
from rollmatch.errors import ErrorList

FOLDER = Path(__file__).parents[2] / "fixtures" / "config"
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


def problems(path):
    with pytest.raises(ErrorList) as caught:
        read_tree(path)
    return caught.value.errors


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
    config = load_config(FOLDER / "good_diamond.yaml")
    training = config.training
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


def test_paths_start_at_the_file_that_holds_them(write, monkeypatch, tmp_path):
    write("deep/leaf.yaml", "a: 1\n")
    write("deep/middle.yaml", "extends: leaf.yaml\nb: 2\n")
    top = write("top.yaml", "extends: deep/middle.yaml\n")
    monkeypatch.chdir(tmp_path / "deep")
    assert read_tree(top) == {"a": 1, "b": 2}


@pytest.mark.scenario(
    "configuration/files-that-extend-each-other-are-refused",
    clauses=["configuration/a-run-is-configured-by-yaml-files-that-build-on-each-other#5"],
)
def test_a_cycle_names_the_whole_chain(write):
    write("two.yaml", "extends: three.yaml\n")
    write("three.yaml", "extends: [two.yaml]\n")
    (error,) = problems(write("one.yaml", "extends: two.yaml\n"))
    assert (error.code, error.key) == ("extends-cycle", "extends")
    places = [error.problem.rindex("two.yaml"), error.problem.index("three.yaml"), error.problem.index("two.yaml")]
    assert places == sorted(places, reverse=True)
    assert "one.yaml" not in error.problem


def test_a_file_that_extends_itself_is_a_cycle(write):
    (error,) = problems(write("one.yaml", "extends: ./one.yaml\n"))
    assert (error.code, error.key) == ("extends-cycle", "extends")


def test_a_missing_first_file_is_named(tmp_path):
    (error,) = problems(tmp_path / "none.yaml")
    assert (error.code, error.key) == ("config-file-missing", str(tmp_path / "none.yaml"))


def test_a_missing_base_names_who_extends_it(write):
    path = write("one.yaml", "extends: gone.yaml\n")
    (error,) = problems(path)
    assert (error.code, error.key) == ("config-file-missing", "extends")
    assert str(path) in error.problem
    write("gone.yaml", "a: 1\n")
    assert read_tree(path) == {"a": 1}


def test_a_directory_is_not_a_file(write, tmp_path):
    (error,) = problems(tmp_path)
    assert (error.code, error.key) == ("config-file-missing", str(tmp_path))


def test_a_file_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes("a: caf\u00e9\n".encode("latin-1"))
    (error,) = problems(path)
    assert (error.code, error.key) == ("config-file-missing", str(path))
    path.write_text("a: caf\u00e9\n", encoding="utf-8")
    assert read_tree(path) == {"a": "caf\u00e9"}


def test_problems_of_several_files_are_told_together(write):
    write("two.yaml", "a: 1\na: 2\n")
    path = write("one.yaml", "extends: [two.yaml, gone.yaml, two.yaml]\n")
    assert [(error.code, error.key) for error in problems(path)] == [
        ("key-duplicated", "a"),
        ("config-file-missing", "extends"),
    ]


@pytest.mark.parametrize("value", ["3", "null", "[a.yaml, 3]", "''", "{a: b}"])
def test_extends_is_a_path_or_a_list_of_paths(write, value):
    (error,) = problems(write("one.yaml", f"extends: {value}\n"))
    assert (error.code, error.key) == ("extends-malformed", "extends")


def test_an_empty_list_extends_nothing(write):
    assert read_tree(write("one.yaml", "extends: []\na: 1\n")) == {"a": 1}


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


def test_a_path_with_a_nul_character_is_malformed(tmp_path):
    (tmp_path / "a.yaml").write_text('extends: "b\\0.yaml"\n')
    with pytest.raises(ErrorList) as caught:
        read_tree(tmp_path / "a.yaml")
    assert [error.code for error in caught.value.errors] == ["extends-malformed"]
