"""Descriptions of matched objects: taught up to where they leave the true one, if asked for."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.answer_formats import FORMATS, FUSING, VOCABULARY, rollout_of, vocabularies
from conformance.doubles.answers import BOX, FAR_BOX, answer, box, boxes, descs, element
from conformance.doubles.configs import config_with
from conformance.doubles.records import make_sample
from conformance.doubles.refusals import refused
from rollmatch.objectives.rollout_matching.match import MatchRules, TransportRules
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.supervision import IGNORED, MaskRules, mask_segment
from rollmatch.objectives.rollout_matching.target import RolloutMatching, serialize_objects

ASKED = config_with("~.desc_ce_weight_matched=0.5").custom.extra.rollout_matching.desc_ce_weight_matched
DEFAULT = config_with().custom.extra.rollout_matching.desc_ce_weight_matched


def taught(response, truth, answer_format=FORMATS[0], vocabulary=VOCABULARY, weight=ASKED):
    """The segment and what it is to learn."""
    matching = RolloutMatching(
        vocabulary, MatchRules(), TransportRules(), lambda sample: answer_format, corrects_descs=weight > 0
    )
    (segment,), _ = matching.make_segments([make_sample(*truth)], [rollout_of(response)])
    rules = MaskRules(desc_ce_weight_matched=weight)
    return segment, mask_segment(segment, rules=rules, bin_of=vocabulary.bin_of)


def prefix_labels(segment, supervision):
    """[(token's text, label's text or None, weight)] of the prefix, without coordinates."""
    prefix = range(segment.prompt_len, segment.prompt_len + segment.prefix_len)
    read = VOCABULARY.piece
    labels = [(i, supervision.labels[i]) for i in prefix]
    return [(read(segment.token_ids[i]), None if k == IGNORED else read(k), supervision.weights[i]) for i, k in labels]


@pytest.mark.scenario(
    "supervision/a-wrong-description-is-corrected",
    clauses=["supervision/the-description-of-a-matched-object-can-be-corrected#3,4"],
)
def test_a_wrong_description_is_corrected():
    segment, supervision = taught(VOCABULARY.encode(answer(element(desc="six"))), [box(desc="sun")])
    labels = prefix_labels(segment, supervision)
    assert [each for each in labels if each[1]] == [(b"s", b"s", 0.5), (b"i", b"u", 0.5)]
    assert (b"x", None, 0.0) in labels


@pytest.mark.scenario("supervision/a-right-description-is-taught-with-its-quote")
def test_a_right_description_is_taught_with_its_quote():
    segment, supervision = taught(VOCABULARY.encode(answer(element(desc="six"))), [box(desc="six")])
    labels = [(mine, label) for mine, label, _ in prefix_labels(segment, supervision) if label]
    assert labels == [(b"s", b"s"), (b"i", b"i"), (b"x", b"x"), (b'", "', b'", "')]


@pytest.mark.scenario(
    "supervision/descriptions-are-not-corrected-unless-asked-for",
    clauses=["supervision/the-description-of-a-matched-object-can-be-corrected#1,2"],
)
def test_descriptions_are_not_corrected_unless_asked_for():
    response = VOCABULARY.encode(answer(element(desc="six")))
    segment, supervision = taught(response, [box(desc="sun")], weight=DEFAULT)
    assert not any(label for _, label, _ in prefix_labels(segment, supervision))
    corrected, _ = taught(response, [box(desc="sun")])
    unasked = mask_segment(corrected, rules=MaskRules(desc_ce_weight_matched=DEFAULT), bin_of=VOCABULARY.bin_of)
    assert unasked == supervision


@pytest.mark.scenario(clauses=["supervision/the-description-of-a-matched-object-can-be-corrected#5"])
def test_what_matched_nothing_keeps_its_description():
    text = answer(element(*FAR_BOX, desc="six"), element(*BOX, desc="six"))
    segment, supervision = taught(VOCABULARY.encode(text), [box(*BOX, desc="sun")])
    assert [label for _, label, _ in prefix_labels(segment, supervision) if label] == [b"s", b"u"]
    first = min(place for place, label in enumerate(supervision.labels) if label != IGNORED)
    assert VOCABULARY.decode(segment.token_ids[segment.prompt_len : first]).count(b"desc") == 2


@given(
    st.lists(boxes(), min_size=1, max_size=3),
    st.lists(descs(), min_size=3, max_size=3),
    st.sampled_from(FORMATS),
    vocabularies,
)
def test_labels_of_a_description_spell_the_true_one_and_end_where_it_is_left(said, wanted, answer_format, vocabulary):
    truth = [box(*each.bins, desc=desc) for each, desc in zip(said, wanted, strict=False)]
    response = vocabulary.encode(serialize_objects(said, answer_format))
    segment, supervision = taught(response, truth, answer_format, vocabulary)
    start, target = segment.prompt_len, segment.token_ids[segment.prompt_len :]
    begins = [len(vocabulary.decode(target[:place])) for place in range(len(target))]
    text = vocabulary.decode(target)
    matching = RolloutMatching(vocabulary, MatchRules(), TransportRules(), lambda sample: answer_format)
    for predicted, true in matching.match(make_sample(*truth), rollout_of(response)).pairs:
        low, high = predicted.desc_span
        true_text = text[:low] + json.dumps(true.desc, ensure_ascii=False)[1:-1].encode() + text[high:]
        touched = [
            place for place, begin in enumerate(begins) if begin < high and (*begins[1:], len(text))[place] > low
        ]
        labels = [supervision.labels[start + place] for place in touched]
        right = [label == target[place] for place, label in zip(touched, labels, strict=True)]
        num_taught = right.index(False) + 1 if False in right else len(right)
        assert IGNORED not in labels[:num_taught]
        assert set(labels[num_taught:]) <= {IGNORED}
        for place, label in zip(touched[:num_taught], labels, strict=False):
            assert true_text[begins[place] :].startswith(vocabulary.piece(label))


@pytest.mark.parametrize(
    "text",
    [
        '{"objects": [{"bbox_2d": [1, 2, 3, 4], "desc" : "desc"}]}',
        r'{"objects": [{"\u0064esc": "d\u0065sc", "bbox_2d": [1, 2, 3, 4]}]}',
    ],
)
def test_a_description_is_found_in_any_spelling(text):
    (found,) = parse_rollout(FUSING.encode(text), FUSING, FORMATS[1]).objects
    low, high = found.desc_span
    assert json.loads(f'"{text.encode()[low:high].decode()}"') == found.desc == "desc"


def test_a_true_description_that_holds_a_special_token_is_refused():
    response = VOCABULARY.encode(answer(element()))
    with refused("desc-holds-added-token", make_sample().origin):
        taught(response, [box(desc="<|im_end|>")])
    taught(response, [box(desc="<|im_end|>")], weight=0.0)
