import math
import time
from itertools import pairwise

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollmatch.config.yaml_dialect import dump, parse_mapping, parse_value
from rollmatch.errors import ErrorList

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12) | st.sampled_from(
    ["1e-5", "010", "yes", "no", "on", "1_000", "12:30", "0x1F", "0o17", "~", "null", "", "<<", ".inf", "2020-01-01"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXTS, below, max_size=3),
    max_leaves=8,
)


def problems(text):
    with pytest.raises(ErrorList) as caught:
        parse_mapping(text, origin="run.yaml")
    return [(error.code, error.key) for error in caught.value.errors]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.5E+3", 1500.0),
        (".5", 0.5),
        ("-7", -7),
        ("0x1F", 31),
        ("true", True),
        ("~", None),
        ("", None),
        ("-.inf", -math.inf),
        ("yes", "yes"),
        ("no", "no"),
        ("010", "010"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2020-01-01", "2020-01-01"),
        ("'1e-5'", "1e-5"),
    ],
)
def test_scalars_follow_the_core_schema(text, value):
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


@given(tree=st.dictionaries(TEXTS, VALUES, max_size=4))
def test_what_is_dumped_is_read_back_equal(tree):
    assert parse_mapping(dump(tree), origin="dump") == tree


@given(text=TEXTS)
def test_dumped_texts_are_texts_to_older_readers_too(text):
    assert yaml.safe_load(dump({"a": text})) == {"a": text}


@pytest.mark.scenario(
    "configuration/a-key-that-is-written-twice-is-refused", clauses=["configuration/unknown-keys-are-refused#3"]
)
def test_duplicates_are_found_at_any_depth_and_told_with_lines():
    with pytest.raises(ErrorList) as caught:
        parse_mapping("a:\n  - b: 1\n    b: 2\nc: 3\nc: 4\n", origin="run.yaml")
    assert [(error.code, error.key) for error in caught.value.errors] == [
        ("key-duplicated", "c"),
        ("key-duplicated", "a.0.b"),
    ]
    assert "line 4" in caught.value.errors[0].problem
    assert "line 5" in caught.value.errors[0].problem


def test_the_same_key_in_two_mappings_is_no_duplicate():
    assert parse_mapping("a: {b: 1}\nc: {b: 2}\n", origin="run.yaml") == {"a": {"b": 1}, "c": {"b": 2}}


def test_anchors_and_merge_keys_work_and_own_keys_win():
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n"
    assert parse_mapping(text, origin="run.yaml")["b"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(("text", "key"), [("1: a\n", "1"), ("a: {null: b}\n", "a.null"), ("a: {true: b}\n", "a.true")])
def test_keys_are_texts(text, key):
    assert problems(text) == [("key-not-text", key)]


def test_a_quoted_number_is_a_fine_key():
    assert parse_mapping("'1': a\n", origin="run.yaml") == {"1": "a"}


@pytest.mark.parametrize("text", ["a: [1\n", "a: b: c\n", "a: *gone\n", "a: \x01\n"])
def test_what_is_no_yaml_is_refused(text):
    assert problems(text) == [("yaml-malformed", "run.yaml")]


def test_two_documents_in_a_file_are_refused():
    assert problems("a: 1\n---\nb: 2\n") == [("yaml-malformed", "run.yaml")]


def test_an_alias_of_itself_is_refused():
    assert problems("a: &a {b: *a}\n") == [("yaml-malformed", "a.b")]


def test_many_aliases_of_one_node_cost_nothing():
    lines = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{l: *a{i - 1}, r: *a{i - 1}}}" for i in range(1, 14)]
    assert parse_mapping("\n".join(lines), origin="run.yaml")["a1"] == {"l": {"x": 1}, "r": {"x": 1}}


@pytest.mark.parametrize("text", ["", "# only a remark\n", "- a\n", "text\n", "null\n"])
def test_a_file_without_mapping_is_refused(text):
    assert problems(text) == [("not-a-mapping", "run.yaml")]


def errors_of(text):
    with pytest.raises(ErrorList) as caught:
        parse_mapping(text, origin="a.yaml")
    return [(error.code, error.key) for error in caught.value.errors]


def test_aliases_of_aliases_are_counted_and_not_expanded():
    names = "abcdefghijkl"
    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in pairwise(names)]
    began = time.perf_counter()
    assert errors_of("\n".join(lines)) == [("yaml-malformed", "f")]
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("!!int abc", "'abc' is not of type int"),
        ("!!float 1x", "'1x' is not of type float"),
        ("!!bool maybe", "'maybe' is not of type bool"),
        ("!!timestamp soon", "tag tag:yaml.org,2002:timestamp is not supported"),
        ("!!set {x, y}", "tag tag:yaml.org,2002:set is not supported"),
        ("!!python/object:os.system x", "tag tag:yaml.org,2002:python/object:os.system is not supported"),
        ("!own x", "tag !own is not supported"),
        ("9" * 5000, "a number of 5000 digits"),
    ],
)
def test_values_that_do_not_fit_their_tag_are_named_with_their_line(value, told):
    with pytest.raises(ErrorList) as caught:
        parse_mapping(f"a:\n  b: {value}\n", origin="a.yaml")
    (error,) = caught.value.errors
    assert (error.code, error.key) == ("yaml-malformed", "a.b")
    assert told in error.problem
    assert "a.yaml, line 2" in error.problem


@pytest.mark.parametrize("depth", [60, 5000])
def test_deep_nesting_is_refused(depth):
    assert errors_of(f"a: {'[' * depth}{']' * depth}")[0][0] == "yaml-malformed"
