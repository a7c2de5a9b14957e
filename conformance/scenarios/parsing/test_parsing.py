"""Capabilities ``parsing`` and ``target``, scenario by scenario."""

from dataclasses import replace

import pytest

from conformance.doubles.answers import answer, box, element, ids
from conformance.doubles.records import make_rollout, make_sample
from conformance.doubles.refusals import refused
from conformance.doubles.tokenizer import ids_of_bytes, make_vocabulary
from rollmatch.objectives.rollout_matching.answer_format import COORD_TOKENS
from rollmatch.objectives.rollout_matching.match import MatchRules, TransportRules
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.target import RolloutMatching, append_missed

OTHER = (500, 500, 700, 700)


def parse(text):
    return parse_rollout(ids(text), make_vocabulary())


def target_of(text, *objects):
    """The report and the decoded target of one response."""
    sample, rollout = make_sample(*objects), make_rollout(ids(text), prompt_token_ids=(0,))
    matching = RolloutMatching(make_vocabulary(), MatchRules(), TransportRules())
    (segment,), (report,) = matching.make_segments([sample], [rollout])
    return report, make_vocabulary().text(segment.token_ids[1:-1])


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
    "parsing/a-letter-of-two-bytes-in-two-tokens-survives",
    clauses=["parsing/the-prefix-ends-after-the-last-well-formed-element#6"],
)
def test_a_letter_of_two_bytes_in_two_tokens_survives():
    text = answer(element(desc="caf\u00e9"))
    response = ids_of_bytes(text.partition('"bbox_2d')[0].encode()) + ids('"bbox_2d' + text.partition('"bbox_2d')[2])
    assert [found.desc for found in parse_rollout(response, make_vocabulary()).objects] == ["caf\u00e9"]


@pytest.mark.scenario(
    "parsing/leading-prose-makes-a-response-invalid",
    clauses=["parsing/an-unreadable-response-falls-back-to-an-empty-list#1,2,3,4"],
)
def test_leading_prose_makes_a_response_invalid():
    text = 'Here you are: {"objects": []}'
    assert parse(text).invalid
    assert (parse(text).prefix_text, parse(text).cut_head) == (COORD_TOKENS.opening, COORD_TOKENS.opening.encode())
    report, target = target_of(text, box(), box(*OTHER, desc="two"))
    assert (report.invalid, report.appended) == (True, 2)
    assert target == answer(element(), element(*OTHER, desc="two"))


@pytest.mark.scenario(clauses=["target/the-target-is-the-prefix-the-missed-objects-and-the-end#7"])
def test_a_cut_head_that_the_tokenizer_rewrites_is_refused(monkeypatch):
    parsed = parse_rollout(ids(answer(element())), make_vocabulary())
    changed = replace(parsed, cut_head="e\u0301".encode())
    with refused("cut-head-not-encodable"):
        append_missed(changed, [], make_vocabulary())
    assert append_missed(parsed, [], make_vocabulary()).text == "]}"
