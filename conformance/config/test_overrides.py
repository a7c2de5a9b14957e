from pathlib import Path

import pytest

from rollmatch.config import load_config
from rollmatch.config.layers import parse_overrides
from rollmatch.errors import ErrorList

MINIMAL = Path(__file__).parents[2] / "fixtures" / "config" / "good_deep_merge.yaml"


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
        ("null", None),
        ("", None),
        ("[1, a]", [1, "a"]),
        ("{b: 1}", {"b": 1}),
        ("'7'", "7"),
        ("x=y", "x=y"),
        ("1e-3", 0.001),
    ],
)
def test_values_are_yaml(text, value):
    assert parse_overrides([f"a={text}"]) == {"a": value}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("training.seed", "training.seed"),
        ("=1", ""),
        ("a..b=1", "a..b"),
        ("a.=1", "a."),
        ("a=[1", "a"),
        ("extends=x", "extends"),
    ],
)
def test_a_malformed_override_is_refused(override, key):
    with pytest.raises(ErrorList) as caught:
        parse_overrides([override, "a.b=1"])
    assert [(error.code, error.key) for error in caught.value.errors] == [("override-malformed", key)]


def test_bad_overrides_and_a_bad_file_are_told_together(tmp_path):
    with pytest.raises(ErrorList) as caught:
        load_config(tmp_path / "none.yaml", ["nonsense", "extends=x"])
    codes = [error.code for error in caught.value.errors]
    assert codes == ["config-file-missing", "override-malformed", "override-malformed"]


def test_an_unknown_key_is_refused_from_the_command_line_too():
    with pytest.raises(ErrorList) as caught:
        load_config(MINIMAL, ["training.sead=7"])
    assert [(error.code, error.key) for error in caught.value.errors] == [("unknown-key", "training.sead")]
    assert "training.seed" in caught.value.errors[0].remedy
