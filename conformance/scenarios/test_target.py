"""Capability ``target``, scenario by scenario."""

from dataclasses import replace

import pytest

from conformance.doubles.tokenizer import make_vocabulary
from conformance.objectives.answers import answer, element, ids
from rollmatch.objectives.rollout_matching.elements import (
    CutHeadNotEncodable,
    append_missed,
)
from rollmatch.objectives.rollout_matching.parse import parse_rollout


@pytest.mark.scenario(clauses=["target/the-target-is-the-prefix-the-missed-objects-and-the-end#7"])
def test_a_cut_head_that_the_tokenizer_rewrites_is_refused(monkeypatch):
    parsed = parse_rollout(ids(answer(element())), make_vocabulary())
    changed = replace(parsed, cut_head="e\u0301".encode())
    with pytest.raises(CutHeadNotEncodable) as caught:
        append_missed(changed, [], make_vocabulary())
    assert caught.value.code == "cut-head-not-encodable"
    assert append_missed(parsed, [], make_vocabulary()).text == "]}"
