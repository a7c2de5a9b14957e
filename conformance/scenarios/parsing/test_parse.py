"""Strict, token-aligned parsing: what is kept, what is a prediction, and what happens to everything else."""

import json

import pytest
from hypothesis import given

from conformance.doubles.answers import BOX, FAR_BOX, UNKNOWN_ID, answer, box, element, ids, poly, quoted, responses
from conformance.doubles.tokenizer import CONTROL_TOKENS, ids_of_bytes, make_vocabulary
from rollmatch.objectives.rollout_matching.answer_format import COORD_TOKENS, DropReason
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.target import serialize_objects
from rollmatch.records import Geometry

VOCABULARY = make_vocabulary()
OPENING = COORD_TOKENS.opening


def parse_text(text):
    return parse_rollout(ids(text), VOCABULARY)


def facts(parsed):
    return [(each.desc, each.geometry, each.bins) for each in parsed.objects]


@pytest.mark.scenario("parsing/a-well-formed-answer-is-read", clauses=["parsing/an-answer-is-one-line-of-json#1,2,3"])
def test_a_proper_answer_keeps_order_and_cuts_the_closing_inside_a_fused_token():
    response = ids(answer(element(), element(*FAR_BOX, desc="two")))
    assert VOCABULARY.piece(response[-1]) == b'"]}]}'
    parsed = parse_rollout(response, VOCABULARY)
    assert facts(parsed) == [("seven", Geometry.BBOX, BOX), ("two", Geometry.BBOX, FAR_BOX)]
    assert parsed.prefix_text == answer(element(), element(*FAR_BOX, desc="two"))[:-2]
    assert (parsed.prefix_token_ids, parsed.cut_head) == (response[:-1], b'"]}')
    assert (parsed.drops, parsed.truncated, parsed.invalid, parsed.num_elements) == ({}, False, False, 2)


@pytest.mark.scenario(
    "parsing/a-cut-between-tokens-changes-no-id",
    clauses=["parsing/the-prefix-ends-after-the-last-well-formed-element#3"],
)
def test_a_cut_at_a_token_border_has_no_head():
    response = ids(answer(element())[:-2]) + ids("]") + ids("}")
    parsed = parse_rollout(response, VOCABULARY)
    assert (parsed.prefix_token_ids, parsed.cut_head) == (response[:-2], b"")


def test_a_token_that_begins_in_mid_character_is_cut_too():
    text = answer(f'{{"bbox_2d": [{quoted(*BOX)}], "desc": "\u00e9"}}')
    response = ids(text)
    assert VOCABULARY.piece(response[-1]) == b'\xa9"}]}'
    parsed = parse_rollout(response, VOCABULARY)
    assert parsed.prefix_text == text[:-2]
    assert (parsed.prefix_token_ids, parsed.cut_head) == (response[:-1], b'\xa9"}')


@pytest.mark.parametrize(
    ("text", "truncated"), [("", True), ("{", True), ('{"obj', True), ("A seven.", False), ('{"a": 1}', False)]
)
def test_without_an_opening_the_prefix_is_ours(text, truncated):
    parsed = parse_text(text)
    assert (parsed.invalid, parsed.truncated, parsed.objects, parsed.num_elements) == (True, truncated, (), 0)
    assert (parsed.prefix_text, parsed.prefix_token_ids, parsed.cut_head) == (OPENING, (), OPENING.encode())
    assert not parse_text('{"objects": [').invalid


@pytest.mark.scenario(
    "parsing/a-truncated-tail-is-cut-back-to-the-last-whole-object",
    clauses=["parsing/nothing-is-repaired#3", "parsing/the-prefix-ends-after-the-last-well-formed-element#1"],
)
def test_every_byte_cut_is_truncation_down_to_the_last_whole_object():
    objects = [box(desc="\u00e9\U0001f600"), poly(desc='a "b" \\'), box(*FAR_BOX, desc="[{,]}")]
    raw = serialize_objects(objects).encode()
    starts = [len(serialize_objects(objects[:n]).encode()) - 2 for n in range(4)]
    for end in range(len(OPENING), len(raw)):
        parsed = parse_rollout(ids_of_bytes(raw[:end]), VOCABULARY)
        assert (parsed.truncated, parsed.invalid) == (True, False)
        assert parsed.num_elements == sum(end >= start for start in starts[1:])
        assert parsed.prefix_text.encode() == raw[: starts[parsed.num_elements]]


@pytest.mark.scenario("parsing/a-stop-token-inside-a-description", clauses=["parsing/a-stop-marker-ends-the-answer#1"])
@pytest.mark.parametrize("control", CONTROL_TOKENS)
def test_a_control_token_ends_the_response_wherever_it_stands(control):
    head = answer(element())
    assert parse_text(head + control + "prose").drops == {}
    inside = parse_text(head[:-2] + ', {"desc": "a' + control + head)
    assert (inside.truncated, inside.num_elements) == (True, 1)


@pytest.mark.scenario(
    "parsing/a-spelled-stop-marker-inside-a-description", clauses=["parsing/a-stop-marker-ends-the-answer#2"]
)
def test_the_literal_of_a_control_token_in_ordinary_tokens_is_text():
    response = ids('{"objects": [{"desc": "') + ids_of_bytes(b"<|im_end|>")
    response += ids(f'", "bbox_2d": [{quoted(*BOX)}]}}]}}')
    assert facts(parse_rollout(response, VOCABULARY)) == [("<|im_end|>", Geometry.BBOX, BOX)]


@pytest.mark.parametrize("bad", [ids_of_bytes(b"\xff"), (UNKNOWN_ID,), ids_of_bytes(b"\xe2\x82")])
def test_undecodable_bytes_are_not_json(bad):
    head, tail = ids('{"objects": [{"desc": "a'), ids(f'", "bbox_2d": [{quoted(*BOX)}]}}]}}')
    parsed = parse_rollout(head + bad + tail, VOCABULARY)
    assert (parsed.drops, parsed.num_elements, parsed.truncated) == ({"malformed": 1}, 0, False)
    assert facts(parse_rollout(head + tail, VOCABULARY)) == [("a", Geometry.BBOX, BOX)]
    assert parse_rollout(ids(answer(element())) + bad, VOCABULARY).drops == {"trailing_text": 1}


def test_a_character_cut_short_by_the_end_is_truncation():
    parsed = parse_rollout(ids('{"objects": [1, {"desc": "') + ids_of_bytes(b"\xe2\x82"), VOCABULARY)
    assert (parsed.truncated, parsed.drops, parsed.num_elements) == (True, {"not_an_object": 1}, 1)


GOOD = element()
SPELLED = '"<|coord_100|>", "<|coord_100|>", "<|coord_300|>", '
BROKEN_ELEMENTS = [
    ("7 ", "not_an_object", GOOD),
    ('"seven"', "not_an_object", GOOD),
    (f"[{GOOD}]", "not_an_object", GOOD),
    (f'{{"desc": "a", "desc": "b", "bbox_2d": [{quoted(*BOX)}]}}', "duplicate_key", element(desc="b")),
    (f'{{"desc": "a", "bbox_2d": [], "bbox_2d": [{quoted(*BOX)}]}}', "duplicate_key", GOOD),
    (f'{{"desc": "a", "score": 1, "bbox_2d": [{quoted(*BOX)}]}}', "unexpected_keys", GOOD),
    (f'{{"bbox_2d": [{quoted(*BOX)}]}}', "missing_desc", GOOD),
    (f'{{"desc": 7, "bbox_2d": [{quoted(*BOX)}]}}', "missing_desc", GOOD),
    (element(desc=" "), "missing_desc", GOOD),
    (element(desc="\\ud800"), "missing_desc", element(desc="\\ud83d\\ude00")),
    (element(desc="\\udfff"), "missing_desc", element(desc="\\ue000")),
    (element(desc="<|coord_5|>"), "coord_token_in_desc", GOOD),
    (element(desc="<|coord_5\\u007c>"), "coord_token_in_desc", GOOD),
    ('{"desc": "a"}', "missing_geometry", GOOD),
    ('{"desc": "a", "bbox_2d": "<|coord_1|>"}', "missing_geometry", GOOD),
    (f'{{"desc": "a", "bbox_2d": [{quoted(*BOX)}], "poly": []}}', "two_geometries", GOOD),
    (f'{{"desc": "a", "bbox_2d": [[{quoted(*BOX)}]]}}', "nested_geometry", GOOD),
    (f'{{"desc": "a", "poly": [[{quoted(1, 1)}], [{quoted(9, 1)}], [{quoted(9, 9)}]]}}', "nested_geometry", GOOD),
    (f'{{"desc": "a", "bbox_2d": [{quoted(1, 1, 9)}]}}', "wrong_arity", element(1, 1, 9, 9)),
    (f'{{"desc": "a", "bbox_2d": [{quoted(1, 1, 9, 9, 9)}]}}', "wrong_arity", element(1, 1, 9, 9)),
    (f'{{"desc": "a", "poly": [{quoted(1, 1, 9, 1)}]}}', "wrong_arity", GOOD),
    (f'{{"desc": "a", "poly": [{quoted(1, 1, 9, 1, 9, 9, 1)}]}}', "wrong_arity", GOOD),
    ('{"desc": "a", "bbox_2d": [100, 100, 300, 300]}', "non_coord_token", GOOD),
    (f'{{"desc": "a", "bbox_2d": [{SPELLED}"300"]}}', "non_coord_token", GOOD),
    (f'{{"desc": "a", "bbox_2d": [{SPELLED}"\\u003c|coord_300|>"]}}', "non_coord_token", GOOD),
    (f'{{"desc": "a", "bbox_2d": [{SPELLED}" <|coord_300|>"]}}', "non_coord_token", GOOD),
    (f'{{"desc": "a", "bbox_2d": [{SPELLED}"<|coord_300|><|coord_1|>"]}}', "non_coord_token", GOOD),
    (f'{{"desc": "a", "bbox_2d": [{SPELLED}{{"x": "<|coord_300|>"}}]}}', "non_coord_token", GOOD),
    (element(100, 100, 100, 300), "bbox_degenerate", element(100, 100, 101, 300)),
    (element(100, 100, 300, 100), "bbox_degenerate", element(100, 100, 300, 101)),
    (element(100, 300, 300, 100), "bbox_degenerate", element(100, 100, 300, 300)),
    (f'{{"desc": "a", "poly": [{quoted(1, 1, 5, 5, 9, 9)}]}}', "poly_degenerate", element()),
]


@pytest.mark.scenario(
    "parsing/each-kind-of-invalid-object-has-its-reason",
    "parsing/an-invalid-object-does-not-hide-its-neighbours",
    clauses=["parsing/nothing-is-repaired#1,2,6"],
)
@pytest.mark.parametrize(("bad", "reason", "good"), BROKEN_ELEMENTS)
def test_json_that_is_no_object_stays_as_context_and_is_no_prediction(bad, reason, good):
    parsed = parse_text(answer(GOOD, bad, element(*FAR_BOX)))
    assert parsed.drops == {reason: 1}
    assert [each.bins for each in parsed.objects] == [BOX, FAR_BOX]
    assert (parsed.num_elements, parsed.truncated, parsed.invalid) == (3, False, False)
    assert bad in parsed.prefix_text
    repaired = parse_text(answer(GOOD, good, element(*FAR_BOX)))
    assert (repaired.drops, len(repaired.objects)) == ({}, 3)
    of_others = {"malformed", "trailing_text", "non_number", "out_of_range"}
    assert {reason for _, reason, _ in BROKEN_ELEMENTS} == set(DropReason) - of_others


def test_a_coordinate_spelled_in_ordinary_tokens_is_no_coordinate():
    head, tail = f'{{"objects": [{{"desc": "a", "bbox_2d": [{quoted(1, 2, 3)}, "', '"]}]}'
    spelled = parse_rollout(ids(head) + ids_of_bytes(b"<|coord_9|>") + ids(tail), VOCABULARY)
    assert (spelled.drops, spelled.objects) == ({"non_coord_token": 1}, ())
    assert [each.bins for each in parse_text(head + "<|coord_9|>" + tail).objects] == [(1, 2, 3, 9)]
    head, tail = ids('{"objects": [{"desc": "<|coord_1|>", "bbox_2d": ["'), ids(f'", {quoted(2, 3, 9)}]}}]}}')
    borrowed = parse_rollout(head + ids_of_bytes(b"<|coord_1|>") + tail, VOCABULARY)
    assert (borrowed.drops, borrowed.objects) == ({"coord_token_in_desc": 1}, ())


@pytest.mark.scenario("parsing/a-second-top-level-value-is-cut-off", clauses=["parsing/nothing-is-repaired#5"])
def test_malformed_cuts_before_and_trailing_text_cuts_after():
    malformed = parse_text(answer(GOOD, '{"desc" "a"}', GOOD))
    assert (malformed.drops, malformed.truncated, malformed.prefix_text) == ({"malformed": 1}, False, OPENING + GOOD)
    trailing = parse_text(answer(GOOD) + " That is all.")
    assert (trailing.drops, trailing.truncated, trailing.prefix_text) == ({"trailing_text": 1}, False, OPENING + GOOD)


@given(responses())
def test_any_response_gives_a_prefix_that_only_lacks_its_closing(response):
    parsed = parse_rollout(response, VOCABULARY)
    whole = json.loads(parsed.prefix_text + "]}", object_pairs_hook=list)
    assert [key for key, _ in whole] == ["objects"]
    assert len(whole[0][1]) == parsed.num_elements
    assert len(parsed.objects) + sum(parsed.drops.values()) >= parsed.num_elements
    assert VOCABULARY.decode(parsed.prefix_token_ids) + parsed.cut_head == parsed.prefix_text.encode()


@pytest.mark.scenario(clauses=["parsing/the-prefix-ends-after-the-last-well-formed-element#3,4"])
@given(responses())
def test_any_response_keeps_its_ids_up_to_the_cut_token(response):
    parsed = parse_rollout(response, VOCABULARY)
    kept = len(parsed.prefix_token_ids)
    assert parsed.prefix_token_ids == response[:kept]
    if parsed.invalid:
        assert (kept, parsed.cut_head) == (0, OPENING.encode())
        return
    if parsed.cut_head:
        piece = VOCABULARY.piece(response[kept])
        assert piece.startswith(parsed.cut_head)
        assert piece != parsed.cut_head
    positions = [position for each in parsed.objects for position in each.positions]
    assert positions == sorted(set(positions))
    assert all(position < kept for position in positions)
    bins = [k for each in parsed.objects for k in each.bins]
    assert [VOCABULARY.bin_of(response[position]) for position in positions] == bins
