"""The tail: commas, closing, stop token, and where the descriptions stand."""

import json
import re

import pytest
from hypothesis import given

from conformance.doubles.answers import answer, box, element, ids, object_lists
from conformance.doubles.refusals import refused
from conformance.doubles.tokenizer import make_vocabulary
from conformance.doubles.tokenizer_checks import tokens_with
from rollmatch.objectives.rollout_matching.answer_format import COORD_TOKENS
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.target import append_missed, serialize_objects

VOCABULARY = make_vocabulary()
DESC = re.compile(rb'"desc": "((?:[^"\\]|\\.)*)"')


def tail_after(text, missed):
    return append_missed(parse_rollout(ids(text), VOCABULARY), missed, VOCABULARY)


@pytest.mark.scenario(
    "target/one-object-found-and-one-missed",
    "target/nothing-was-missed",
    "target/an-empty-list-gets-no-comma",
    "target/an-invalid-element-needs-a-comma",
    clauses=["target/the-target-is-the-prefix-the-missed-objects-and-the-end#1,3,4,5,6"],
)
@pytest.mark.parametrize(
    ("response", "num_missed", "expected"),
    [
        ("", 0, "]}"),
        ("", 1, element() + "]}"),
        ('{"objects": []}', 0, "]}"),
        ('{"objects": [', 2, element() + ", " + element() + "]}"),
        (answer(element()), 0, "]}"),
        (answer(element()), 1, ", " + element() + "]}"),
        ('{"objects": [' + element() + ", ", 1, ", " + element() + "]}"),
        ('{"objects": [' + element() + ", ", 0, "]}"),
        ('{"objects": [7, ', 1, ", " + element() + "]}"),
    ],
)
def test_a_comma_stands_only_between_elements(response, num_missed, expected):
    parsed = parse_rollout(ids(response), VOCABULARY)
    tail = append_missed(parsed, [box()] * num_missed, VOCABULARY)
    assert tail.text == expected
    again = VOCABULARY.decode(parsed.prefix_token_ids[tail.num_kept :])
    assert VOCABULARY.decode(tail.token_ids[:-1]) == again + parsed.cut_head + expected.encode()
    assert tail.token_ids[-1] == VOCABULARY.stop_id


@pytest.mark.scenario(
    "target/a-token-that-closed-too-early-is-taught-again",
    clauses=["target/the-target-is-the-prefix-the-missed-objects-and-the-end#2"],
)
def test_the_cut_head_and_what_follows_are_the_models_own_token():
    closed_too_early = ids(answer(element()))
    assert VOCABULARY.piece(closed_too_early[-1]) == b'"]}]}'
    parsed = parse_rollout(closed_too_early, VOCABULARY)
    tail = append_missed(parsed, [box()], VOCABULARY)
    assert VOCABULARY.piece(tail.token_ids[0]) == b'"]}, {"'
    assert (*parsed.prefix_token_ids[: tail.num_kept], *tail.token_ids[:-1]) == ids(answer(element(), element()))


@given(object_lists())
def test_desc_positions_are_the_tokens_that_overlap_a_description(missed):
    cut_off = '{"objects": [' + element()  # its last token is written again, as a part of a longer one
    for response in ("", answer(element()), cut_off):
        tail = tail_after(response, missed)
        parsed = parse_rollout(ids(response), VOCABULARY)
        again = VOCABULARY.decode(parsed.prefix_token_ids[tail.num_kept :])
        raw = again + parsed.cut_head + tail.text.encode()
        inside = {byte for found in DESC.finditer(raw) for byte in range(*found.span(1))}
        assert tail.desc_positions == tokens_with(inside, tail.token_ids[:-1], VOCABULARY)
        assert VOCABULARY.decode(tail.token_ids[:-1]) == raw
        assert tail.token_ids[-1] == VOCABULARY.stop_id


@given(object_lists())
def test_prefix_and_tail_are_json(missed):
    whole = json.loads(COORD_TOKENS.opening + tail_after("", missed).text)
    assert [each["desc"] for each in whole["objects"]] == [each.desc for each in missed]
    assert whole == json.loads(serialize_objects(missed))


def test_the_answer_is_one_line_of_json_with_quoted_coordinates():
    bins = '["<|coord_12|>", "<|coord_40|>", "<|coord_310|>", "<|coord_505|>"]'
    escaped = '{"desc": "\u00e9 \\"x\\"", "bbox_2d": ' + bins + "}"
    assert serialize_objects([box(12, 40, 310, 505, desc='\u00e9 "x"')]) == answer(escaped)


@pytest.mark.parametrize("literal", ["<|im_end|>", "a <|coord_5|>", "<|coord_*|>"])
def test_a_description_that_spells_an_added_token_is_an_error(literal):
    with refused("desc-holds-added-token", "missed[1].desc"):
        tail_after("", [box(), box(desc=literal)])
    assert tail_after("", [box(), box(desc=literal.replace("|>", ">"))])
