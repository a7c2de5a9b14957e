"""Capability ``parsing``, scenario by scenario."""

import json

import pytest
from tokenizers import Tokenizer

from conformance.doubles.tokenizer import ids_of_bytes, make_tokenizer, make_vocabulary
from conformance.objectives.answers import answer, box, element, ids, quoted
from rollmatch.model.vocabulary import CoordTokensMissing, Vocabulary
from rollmatch.objectives.rollout_matching.elements import OPENING
from rollmatch.objectives.rollout_matching.match import MatchRules
from rollmatch.objectives.rollout_matching.objective import RolloutMatching
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.supervision import TransportRules
from rollmatch.records import Rollout, Sample

OTHER = (500, 500, 700, 700)


def parse(text):
    return parse_rollout(ids(text), make_vocabulary())


def target_of(text, *objects):
    """The report and the decoded target of one response."""
    sample = Sample(sample_id=0, origin="x:1", images=(), objects=objects, width=8, height=8)
    rollout = Rollout(
        request_id="0.0.0",
        prompt_token_ids=(0,),
        response_token_ids=ids(text),
        finish_reason="stop",
        policy_version=1,
    )
    matching = RolloutMatching(make_vocabulary(), MatchRules(), TransportRules())
    (segment,), (report,) = matching.make_segments([sample], [rollout])
    return report, make_vocabulary().text(segment.token_ids[1:-1])


@pytest.mark.scenario("parsing/a-well-formed-answer-is-read", clauses=["parsing/an-answer-is-one-line-of-json#1,2,3"])
def test_a_well_formed_answer_is_read():
    parsed = parse(answer(element(12, 40, 310, 505)))
    assert [(found.desc, found.bins) for found in parsed.objects] == [("seven", (12, 40, 310, 505))]
    assert parsed.drops == {}
    assert (parsed.truncated, parsed.invalid) == (False, False)
    empty = parse('{"objects": []}')
    assert (empty.objects, empty.invalid, empty.truncated) == ((), False, False)


@pytest.mark.scenario(
    "parsing/a-tokenizer-without-coordinate-tokens-is-refused", clauses=["parsing/an-answer-is-one-line-of-json#4"]
)
def test_a_tokenizer_without_coordinate_tokens_is_refused(tmp_path):
    tokenizer = json.loads(make_tokenizer().to_str())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "<|coord_7|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CoordTokensMissing) as caught:
        Vocabulary.load(tmp_path)
    assert (caught.value.code, caught.value.key) == ("coord-tokens-missing", "model.model")
    Tokenizer.from_str(make_tokenizer().to_str()).save(str(tmp_path / "tokenizer.json"))
    assert len(Vocabulary.load(tmp_path).coord_ids) == 1000


@pytest.mark.scenario(
    "parsing/a-token-that-fuses-two-objects-is-cut-inside",
    clauses=["parsing/the-prefix-ends-after-the-last-well-formed-element#1,2,3,4,5"],
)
def test_a_token_that_fuses_two_objects_is_cut_inside():
    response = ids(answer(element(), element(*OTHER)))[:-8]
    fused = make_vocabulary().encode('"]}, {"')[0]
    assert fused in response
    parsed = parse_rollout(response, make_vocabulary())
    assert parsed.prefix_text.endswith("]}")
    assert len(parsed.objects) == 1
    kept = response.index(fused)
    assert parsed.prefix_token_ids == response[:kept]
    assert parsed.cut_head == b'"]}'


@pytest.mark.scenario(
    "parsing/a-cut-between-tokens-changes-no-id",
    clauses=["parsing/the-prefix-ends-after-the-last-well-formed-element#3"],
)
def test_a_cut_between_tokens_changes_no_id():
    whole = f'{{"objects": [{{"desc": "seven", "bbox_2d": [{quoted(*OTHER)}]}}'.encode()
    head, tail = ids(whole.decode()[: -len('"]}')]), ids_of_bytes(b'"]}')
    response = (*head, *tail, *ids_of_bytes(b"]}"))
    parsed = parse_rollout(response, make_vocabulary())
    assert parsed.prefix_token_ids == response[: len(head) + len(tail)]
    assert parsed.cut_head == b""


@pytest.mark.scenario(
    "parsing/a-letter-of-two-bytes-in-two-tokens-survives",
    clauses=["parsing/the-prefix-ends-after-the-last-well-formed-element#6"],
)
def test_a_letter_of_two_bytes_in_two_tokens_survives():
    text = answer(element(desc="caf\u00e9"))
    response = ids_of_bytes(text.partition('"bbox_2d')[0].encode()) + ids('"bbox_2d' + text.partition('"bbox_2d')[2])
    assert [found.desc for found in parse_rollout(response, make_vocabulary()).objects] == ["caf\u00e9"]


INVALID = {
    "not_an_object": "7",
    "duplicate_key": f'{{"desc": "a", "desc": "b", "bbox_2d": [{quoted(*OTHER)}]}}',
    "unexpected_keys": f'{{"desc": "a", "score": 1, "bbox_2d": [{quoted(*OTHER)}]}}',
    "missing_desc": element(desc=""),
    "coord_token_in_desc": element(desc="<|coord_5|>"),
    "missing_geometry": '{"desc": "a"}',
    "two_geometries": f'{{"desc": "a", "bbox_2d": [{quoted(*OTHER)}], "poly": [{quoted(1, 1, 9, 1, 9, 9)}]}}',
    "nested_geometry": f'{{"desc": "a", "poly": [[{quoted(1, 1)}], [{quoted(9, 1)}], [{quoted(9, 9)}]]}}',
    "wrong_arity": element(1, 2, 3),
    "non_coord_token": '{"desc": "a", "bbox_2d": [1, 2, 3, 4]}',
    "bbox_degenerate": element(300, 20, 300, 400),
    "poly_degenerate": f'{{"desc": "a", "poly": [{quoted(1, 1, 5, 5, 9, 9)}]}}',
}


@pytest.mark.scenario(
    "parsing/each-kind-of-invalid-object-has-its-reason", clauses=["parsing/nothing-is-repaired#1,2,6"]
)
def test_each_kind_of_invalid_object_has_its_reason():
    parsed = parse(answer(*INVALID.values()))
    assert parsed.drops == dict.fromkeys(INVALID, 1)
    assert parsed.objects == ()
    assert parsed.num_elements == len(INVALID) == 12
    assert all(each in parsed.prefix_text for each in INVALID.values())


@pytest.mark.scenario(
    "parsing/an-invalid-object-does-not-hide-its-neighbours", clauses=["parsing/nothing-is-repaired#1"]
)
def test_an_invalid_object_does_not_hide_its_neighbours():
    parsed = parse(answer(element(desc="one"), element(1, 2, 3), element(*OTHER, desc="three")))
    assert [found.desc for found in parsed.objects] == ["one", "three"]
    assert parsed.num_elements == 3


@pytest.mark.scenario("parsing/a-second-top-level-value-is-cut-off", clauses=["parsing/nothing-is-repaired#5"])
def test_a_second_top_level_value_is_cut_off():
    parsed = parse(answer(element()) + '{"objects": []}')
    assert len(parsed.objects) == 1
    assert parsed.drops == {"trailing_text": 1}
    assert parsed.prefix_text == OPENING + element()


@pytest.mark.scenario(
    "parsing/a-truncated-tail-is-cut-back-to-the-last-whole-object",
    clauses=["parsing/nothing-is-repaired#3", "parsing/the-prefix-ends-after-the-last-well-formed-element#1"],
)
def test_a_truncated_tail_is_cut_back_to_the_last_whole_object():
    whole = answer(element(), element(*OTHER), element(10, 10, 20, 20))
    parsed = parse(whole[: whole.rindex("<|coord_20|>")])
    assert len(parsed.objects) == 2
    assert parsed.truncated
    assert parsed.prefix_text == OPENING + element() + ", " + element(*OTHER)


@pytest.mark.scenario("parsing/a-missing-comma-ends-the-reading", clauses=["parsing/nothing-is-repaired#3"])
def test_a_missing_comma_ends_the_reading():
    parsed = parse(answer(element() + " " + element(*OTHER)))
    assert [found.bins for found in parsed.objects] == [(100, 100, 300, 300)]
    assert parsed.drops == {"malformed": 1}
    assert not parsed.truncated


@pytest.mark.scenario("parsing/a-list-of-33-levels-is-not-read", clauses=["parsing/nothing-is-repaired#4"])
def test_a_list_of_33_levels_is_not_read():
    parsed = parse(answer(element(), "[" * 33 + "]" * 33))
    assert (len(parsed.objects), parsed.drops, parsed.num_elements) == (1, {"malformed": 1}, 1)
    assert parse(answer(element(), "[" * 32 + "]" * 32)).num_elements == 2


@pytest.mark.scenario("parsing/a-stop-token-inside-a-description", clauses=["parsing/a-stop-marker-ends-the-answer#1"])
def test_a_stop_token_inside_a_description():
    parsed = parse(answer(element(), element(*OTHER, desc="se<|im_end|>ven")))
    assert parsed.truncated
    assert parsed.prefix_text == OPENING + element()


@pytest.mark.scenario(
    "parsing/a-spelled-stop-marker-inside-a-description", clauses=["parsing/a-stop-marker-ends-the-answer#2"]
)
def test_a_spelled_stop_marker_inside_a_description():
    head, tail = answer(element(desc="a<|im_end|>b")).split("<|im_end|>")
    response = (*ids(head), *ids_of_bytes(b"<|im_end|>"), *ids(tail))
    assert [found.desc for found in parse_rollout(response, make_vocabulary()).objects] == ["a<|im_end|>b"]


@pytest.mark.scenario(
    "parsing/leading-prose-makes-a-response-invalid",
    clauses=["parsing/an-unreadable-response-falls-back-to-an-empty-list#1,2,3,4"],
)
def test_leading_prose_makes_a_response_invalid():
    text = 'Here you are: {"objects": []}'
    assert parse(text).invalid
    assert (parse(text).prefix_text, parse(text).cut_head) == (OPENING, OPENING.encode())
    report, target = target_of(text, box(), box(*OTHER, desc="two"))
    assert (report.invalid, report.appended) == (True, 2)
    assert target == answer(element(), element(*OTHER, desc="two"))


@pytest.mark.scenario("parsing/white-space-before-the-brace-is-legal")
def test_white_space_before_the_brace_is_legal():
    assert not parse(' {"objects": []}').invalid
