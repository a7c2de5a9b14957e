import math
import time
from itertools import pairwise

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.refusals import refused
from rollmatch.config.yaml_dialect import dump, lines_of, parse_mapping, parse_value
from rollmatch.errors import ErrorList

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12) | st.sampled_from(
    ["1e-5", "010", "yes", "no", "on", "1_000", "12:30", "0x1F", "0o17", "~", "null", "", "<<", ".inf", "2020-01-01"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXTS, below, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-5", 1e-5), ("1.5E+3", 1500.0), (".5", 0.5), ("-.inf", -math.inf)),
        *(("-7", -7), ("0x1F", 31), ("true", True), ("~", None), ("", None), ("'1e-5'", "1e-5")),
        *((text, text) for text in ("yes", "no", "010", "1_000", "12:30", "2020-01-01")),
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
def test_duplicates_are_found_at_any_depth_with_their_lines():
    with pytest.raises(ErrorList) as caught:
        parse_mapping("a:\n  - b: 1\n    b: 2\nc: 3\nc: 4\n", origin="run.yaml")
    assert [(error.code, error.key) for error in caught.value.errors] == [
        ("key-duplicated", "c"),
        ("key-duplicated", "a.0.b"),
    ]
    assert "line 4" in caught.value.errors[0].problem
    assert "line 5" in caught.value.errors[0].problem


@pytest.mark.parametrize(
    ("texts", "code", "key"),
    [
        (("a: [1\n", "a: b: c\n", "a: *gone\n", "a: \x01\n", "a: 1\n---\nb: 2\n"), "yaml-malformed", "run.yaml"),
        (("a: &a {b: *a}\n",), "yaml-malformed", "a.b"),
        (tuple(f"a: {'[' * depth}{']' * depth}" for depth in (60, 5000)), "yaml-malformed", None),
        (("", "# only a remark\n", "- a\n", "text\n", "null\n"), "not-a-mapping", "run.yaml"),
        (("1: a\n",), "key-not-text", "1"),
        (("a: {null: b}\n",), "key-not-text", "a.null"),
        (("a: {true: b}\n",), "key-not-text", "a.true"),
    ],
)
def test_what_is_no_mapping_of_texts_in_yaml_is_refused(texts, code, key):
    for text in texts:
        with refused(code, key):
            parse_mapping(text, origin="run.yaml")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a: {b: 1}\nc: {b: 2}\n", {"a": {"b": 1}, "c": {"b": 2}}),
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n", {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}),
        ("'1': a\n", {"1": "a"}),
    ],
)
def test_equal_keys_of_two_mappings_merge_keys_and_quoted_numbers_are_legal(text, tree):
    assert parse_mapping(text, origin="run.yaml") == tree


def test_aliases_of_aliases_are_counted_and_not_expanded():
    few = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{l: *a{i - 1}, r: *a{i - 1}}}" for i in range(1, 14)]
    assert parse_mapping("\n".join(few), origin="run.yaml")["a1"] == {"l": {"x": 1}, "r": {"x": 1}}
    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in pairwise("abcdefghijkl")]
    began = time.perf_counter()
    with refused("yaml-malformed", "f"):
        parse_mapping("\n".join(lines), origin="a.yaml")
    assert time.perf_counter() - began < 2


def test_places_are_counted_also_of_what_is_nested_too_deeply_or_too_often():
    """They are looked up for the message, after the document was refused."""
    maps = ["a0: &a0 {x: 1, y: 2}"] + [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 40)]
    began = time.perf_counter()
    assert lines_of("\n".join(maps))["a1.x.y"] == 1
    assert lines_of(f"a: {'[' * 20_000}{']' * 20_000}") == {}
    assert time.perf_counter() - began < 20


def test_the_largest_document_is_read_and_one_value_more_is_refused():
    deep = [f"a: {'[' * depth}{']' * depth}" for depth in (50, 51)]
    long = [f"a: &a [{'1, ' * 999}]\nb: [{'*a, ' * 100}{more}]" for more in ("", "1")]
    digits = [f"a: {'9' * number}" for number in (400, 401)]
    for most, too_many in (deep, long, digits):
        assert "a" in parse_mapping(most, origin="a.yaml")
        with refused("yaml-malformed"):
            parse_mapping(too_many, origin="a.yaml")


def test_a_written_document_is_read_as_it_is_written():
    assert dump({"zoo": "\u540d", "a": ["caf\u00e9"]}) == "zoo: \u540d\na:\n- caf\u00e9\n"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("!!int " + "x" * 70, f"'{'x' * 60}' is not of type int"),
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
def test_values_that_do_not_fit_their_tag_are_named_with_their_line(value, found):
    with refused("yaml-malformed", "a.b", problem=found) as caught:
        parse_mapping(f"a:\n  b: {value}\n", origin="a.yaml")
    assert "a.yaml, line 2" in caught.value.errors[0].problem
