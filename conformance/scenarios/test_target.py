"""Capability ``target``, scenario by scenario."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.tokenizer import make_vocabulary
from conformance.objectives.answers import PLACES, answer, box, element, ids, object_lists, tokens
from conformance.scenarios.configs import not_refused
from rollmatch.errors import TargetError
from rollmatch.objectives.rollout_matching.elements import (
    CutHeadNotEncodable,
    DescChangedByTokenizer,
    DescHoldsAddedToken,
    append_missed,
    serialize_objects,
)
from rollmatch.objectives.rollout_matching.match import MatchRules, match_objects
from rollmatch.objectives.rollout_matching.objective import RolloutMatching
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.supervision import MaskRules, TransportRules, mask_segment
from rollmatch.records import Rollout, Sample

OTHER = (600, 600, 900, 900)
CONTEXT = (0, 0)


def make(response, *objects):
    """The segment and the report of one response."""
    sample = Sample(sample_id=0, origin="x:1", images=(), objects=objects, width=8, height=8)
    rollout = Rollout(
        request_id="0.0.0",
        prompt_token_ids=CONTEXT,
        response_token_ids=response,
        finish_reason="stop",
        policy_version=1,
    )
    made, reports = RolloutMatching(make_vocabulary(), MatchRules(), TransportRules()).make_segments(
        [sample], [rollout]
    )
    return made[0], reports[0]


def appended_to(text, *objects):
    """The text behind what the model wrote itself."""
    segment, _ = make(ids(text), *objects)
    parsed = parse_rollout(ids(text), make_vocabulary())
    target = make_vocabulary().text(segment.token_ids[segment.prompt_len : -1])
    assert target.startswith(parsed.prefix_text)
    return target.removeprefix(parsed.prefix_text)


@pytest.mark.scenario(
    "target/one-object-found-and-one-missed",
    clauses=["target/the-target-is-the-prefix-the-missed-objects-and-the-end#1,3,4,5"],
)
def test_one_object_found_and_one_missed():
    response = ids(answer(element()))
    segment, _ = make(response, box(), box(*OTHER, desc="two"))
    target, kept = segment.token_ids[segment.prompt_len :], segment.prefix_len
    assert kept >= response.index(make_vocabulary().coord_ids[300])
    assert target[:kept] == response[:kept]
    found = appended_to(answer(element()), box(), box(*OTHER, desc="two"))
    assert found.startswith(", ")
    assert '"two"' in found
    assert found.endswith("]}")
    assert target[-1] == make_vocabulary().stop_id


@pytest.mark.scenario(
    "target/nothing-was-missed", clauses=["target/the-target-is-the-prefix-the-missed-objects-and-the-end#4"]
)
def test_nothing_was_missed():
    assert appended_to(answer(element()), box()) == "]}"


@pytest.mark.scenario(
    "target/an-empty-list-gets-no-comma", clauses=["target/the-target-is-the-prefix-the-missed-objects-and-the-end#6"]
)
def test_an_empty_list_gets_no_comma():
    assert appended_to('{"objects": []}', box()).startswith('{"desc"')


@pytest.mark.scenario(
    "target/an-invalid-element-needs-a-comma",
    clauses=["target/the-target-is-the-prefix-the-missed-objects-and-the-end#6"],
)
def test_an_invalid_element_needs_a_comma():
    assert appended_to(answer("7"), box()).startswith(', {"desc"')


def cut_and_changed():
    """An answer as ids, cut off at any token, with any token replaced by any other."""
    return st.builds(_cut_and_change, object_lists(max_size=3).map(serialize_objects), PLACES, PLACES, tokens())


def _cut_and_change(text, end, place, token):
    response = list(ids(text))
    response = response[: end % (len(response) + 1)]
    if response:
        response[place % len(response)] = token
    return tuple(response)


@pytest.mark.scenario(
    "target/any-response-leads-to-whole-json", clauses=["target/every-target-is-json-with-every-true-object-once#1,2"]
)
@given(cut_and_changed(), object_lists(max_size=3))
def test_any_response_leads_to_whole_json(response, objects):
    try:
        segment, report = make(response, *objects)
    except (DescHoldsAddedToken, DescChangedByTokenizer):
        return
    text = make_vocabulary().text(segment.token_ids[segment.prompt_len : -1])
    try:
        listed = json.loads(text)["objects"]
    except ValueError:
        pytest.fail(f"no JSON: {text!r}")
    parsed = parse_rollout(response, make_vocabulary())
    found = match_objects(parsed.objects, objects, MatchRules())
    missed = [objects[index] for index in found.false_negatives]
    assert listed[parsed.num_elements :] == json.loads(serialize_objects(missed))["objects"]
    assert report.num_matched + report.appended == len(objects)


@pytest.mark.scenario(
    "target/a-description-that-spells-the-stop-token",
    clauses=["target/a-description-that-would-turn-into-special-tokens-is-refused#1"],
)
def test_a_description_that_spells_the_stop_token():
    with pytest.raises(DescHoldsAddedToken) as caught:
        make(ids(answer()), box(desc="<|im_end|>"))
    assert (caught.value.code, caught.value.key) == ("desc-holds-added-token", "x:1")
    assert make(ids(answer()), box(desc="im_end"))[1].appended == 1


@pytest.mark.scenario(
    "target/a-description-that-the-tokenizer-rewrites",
    clauses=["target/a-description-that-would-turn-into-special-tokens-is-refused#2"],
)
def test_a_description_that_the_tokenizer_rewrites():
    with pytest.raises(TargetError) as caught:
        make(ids(answer()), box(desc="cafe\u0301"))
    assert (caught.value.code, caught.value.key) == ("desc-changed-by-tokenizer", "x:1")


@pytest.mark.scenario("target/a-plain-description-is-accepted")
def test_a_plain_description_is_accepted():
    with not_refused():
        assert '"cafe"' in appended_to(answer(), box(desc="cafe"))


@pytest.mark.scenario(
    "target/a-token-that-closed-too-early-is-taught-anew",
    clauses=["target/the-target-is-the-prefix-the-missed-objects-and-the-end#2"],
)
def test_a_token_that_closed_too_early_is_taught_anew():
    early, going_on = (make_vocabulary().encode(text)[0] for text in ('"]}]}', '"]}, {"'))
    response = ids(answer(element()))
    assert response[-1] == early
    segment, _ = make(response, box(), box(*OTHER, desc="two"))
    tail = segment.prompt_len + segment.prefix_len
    assert segment.token_ids[segment.prompt_len : tail] == response[:-1]
    assert segment.token_ids[tail] == going_on
    labels = mask_segment(segment, rules=MaskRules(), bin_of=make_vocabulary().bin_of).labels
    assert labels[tail] == going_on


@pytest.mark.scenario(clauses=["target/the-target-is-the-prefix-the-missed-objects-and-the-end#7"])
def test_a_cut_head_that_the_tokenizer_rewrites_is_refused(monkeypatch):
    parsed = parse_rollout(ids(answer(element())), make_vocabulary())
    changed = replace(parsed, cut_head="e\u0301".encode())
    with pytest.raises(CutHeadNotEncodable) as caught:
        append_missed(changed, [], make_vocabulary())
    assert caught.value.code == "cut-head-not-encodable"
    assert append_missed(parsed, [], make_vocabulary()).text == "]}"
