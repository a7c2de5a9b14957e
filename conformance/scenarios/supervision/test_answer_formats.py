"""Answer formats: what is written is read, any response becomes a whole answer, numbers are taught while they fit."""

import json
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.answer_formats import FORMATS, FUSING, PIXELS, VOCABULARY, rollout_of, vocabularies
from conformance.doubles.answers import BOX, FAR_BOX, PLACES, box, boxes, object_lists, poly, tokens
from conformance.doubles.records import make_sample
from conformance.doubles.refusals import refused
from conformance.doubles.tokenizer import CONTROL_TOKENS, ids_of_bytes
from rollmatch.objectives.rollout_matching.answer_format import (
    ANSWER_FORMATS,
    INTEGERS,
    QWEN2_5_VL,
    QWEN3_VL,
)
from rollmatch.objectives.rollout_matching.match import MatchRules, TransportRules
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.supervision import (
    IGNORED,
    Correction,
    MaskRules,
    label_corrections,
    mask_segment,
)
from rollmatch.objectives.rollout_matching.target import RolloutMatching, append_missed, serialize_objects
from rollmatch.records import Geometry
from rollmatch.run.plugins import load_answer_format

NUMBERS = [INTEGERS, QWEN3_VL, PIXELS]
any_format = st.sampled_from(FORMATS)


def facts(objects):
    return [(each.desc, each.geometry, each.bins) for each in objects]


def matching_of(answer_format, vocabulary, **rules):
    return RolloutMatching(vocabulary, MatchRules(**rules), TransportRules(), lambda sample: answer_format)


def make(response, truth, answer_format, vocabulary, **rules):
    matching = matching_of(answer_format, vocabulary, **rules)
    (segment,), (report,) = matching.make_segments([make_sample(*truth)], [rollout_of(response)])
    return segment, report


@pytest.mark.scenario(clauses=["parsing/the-answer-format-decides-how-objects-are-written#1,2,3,4,5,7"])
@given(object_lists(), any_format, vocabularies)
def test_what_a_format_writes_it_reads(objects, answer_format, vocabulary):
    response = vocabulary.encode(serialize_objects(objects, answer_format))
    parsed = parse_rollout(response, vocabulary, answer_format)
    assert facts(parsed.objects) == facts(map(answer_format.shaped, objects))
    assert (parsed.num_elements, parsed.truncated, parsed.invalid, parsed.drops) == (len(objects), False, False, {})


@given(boxes(), st.integers(2, 5000), st.integers(2, 5000))
def test_a_small_image_rounds_a_box_once_and_keeps_its_sides_apart(truth, width, height):
    answer_format = QWEN2_5_VL.fitted(width, height)
    once = answer_format.numbers_of(Geometry.BBOX, truth.bins)
    assert once[0] < once[2] < width
    assert once[1] < once[3] < height
    for place, (number, k) in enumerate(zip(once, truth.bins, strict=True)):
        assert abs(number - k * ((width, height)[place % 2] - 1) / 999) <= 1.5
    assert max(width, height) > 1000 or answer_format.numbers_of(Geometry.BBOX, answer_format.bins_of(once)) == once


@given(object_lists(), any_format, vocabularies)
def test_positions_and_spans_are_those_of_descriptions_and_coordinates(objects, answer_format, vocabulary):
    response = vocabulary.encode(serialize_objects(objects, answer_format))
    raw = vocabulary.decode(response)
    for found in parse_rollout(response, vocabulary, answer_format).objects:
        low, high = found.desc_span
        assert json.loads(b'"' + raw[low:high] + b'"') == found.desc
        literals = [raw[start:end].decode() for start, end in found.spans]
        assert literals == [str(answer_format.literal(n)) for n in answer_format.numbers_of(found.geometry, found.bins)]
        for position, (start, _) in zip(found.positions, found.spans, strict=True):
            first = len(vocabulary.decode(response[:position]))
            assert first <= start < first + len(vocabulary.piece(response[position]))


@given(object_lists(max_size=3), object_lists(max_size=2), any_format, vocabularies, PLACES)
def test_append_after_any_cut_gives_a_whole_answer_with_every_true_object(said, missed, answer_format, vocabulary, cut):
    raw = serialize_objects(said, answer_format).encode()
    whole_ids = ids_of_bytes(raw) if not answer_format.uses_tokens else vocabulary.encode(raw.decode())
    for ids in (whole_ids, vocabulary.encode(raw.decode())):
        response = ids[: cut % (len(ids) + 1)]
        parsed = parse_rollout(response, vocabulary, answer_format)
        tail = append_missed(parsed, missed, vocabulary, answer_format)
        assert tail.token_ids[-1] == vocabulary.stop_id
        whole = parse_rollout((*parsed.prefix_token_ids[: tail.num_kept], *tail.token_ids), vocabulary, answer_format)
        assert (whole.truncated, whole.invalid, whole.drops) == (False, False, {})
        kept = parsed.objects
        shaped = [answer_format.shaped(each) for each in missed]
        assert facts(whole.objects) == facts(kept) + facts(shaped)
        assert facts(kept) == facts(map(answer_format.shaped, said))[: len(kept)]


WORDS = ["1e2", "0.0", "false", '"label": "x"', "bbox_2d", "```", "]}", "```json\n[", "9" * 5000]
SNIPPETS = [*'{}[],:"\n-1', *WORDS]


@given(
    object_lists(max_size=2),
    any_format,
    st.lists(st.tuples(PLACES, st.integers(0, 4), st.sampled_from(SNIPPETS)), max_size=4),
    st.lists(tokens(), max_size=2),
    object_lists(max_size=2),
)
def test_hostile_text_never_raises_and_still_becomes_a_whole_answer(said, answer_format, edits, extra, truth):
    text = serialize_objects(said, answer_format)
    for place, length, part in edits:
        place %= len(text) + 1
        text = text[:place] + part + text[place + length :]
    ids = FUSING.encode(text)
    middle = len(ids) // 2
    segment, report = make((*ids[:middle], *extra, *ids[middle:]), truth, answer_format, FUSING)
    whole = parse_rollout(segment.token_ids[2:], FUSING, answer_format)
    assert (whole.invalid, whole.truncated) == (False, False)
    assert report.num_matched + report.appended == len(truth)
    supervision = mask_segment(segment, rules=MaskRules(), bin_of=FUSING.bin_of)
    assert supervision.labels[-1] == FUSING.stop_id


@pytest.mark.scenario(
    "parsing/a-fenced-list-is-read",
    "parsing/pixels-of-the-resized-image-are-read",
    "parsing/numbers-with-an-error-are-dropped",
    clauses=["parsing/the-answer-format-decides-how-objects-are-written#3,4,6"],
)
def test_forms_by_hand():
    def read(text, answer_format):
        return parse_rollout(VOCABULARY.encode(text), VOCABULARY, answer_format)

    fenced = read('```json [{"bbox_2d": [12, 40, 310, 1000], "label": "cat"}] ```', QWEN3_VL)
    assert facts(fenced.objects) == [("cat", Geometry.BBOX, (12, 40, 310, 999))]
    assert (fenced.truncated, fenced.invalid) == (False, False)
    pixels = '```json\n[{"bbox_2d": [250, 250, 500, 1000], "label": "cat"}]\n```'
    assert read(pixels, QWEN2_5_VL.fitted(501, 1001)).objects[0].bins == (500, 250, 999, 999)
    last = ("1000", "9.0", '"9"', "9")
    elements = ", ".join(f'{{"desc": "a", "bbox_2d": [1, 1, 9, {each}]}}' for each in last)
    parsed = read(f'{{"objects": [{elements}]}}', INTEGERS)
    assert (parsed.drops, len(parsed.objects)) == ({"out_of_range": 1, "non_number": 2}, 1)
    for hostile in ("false, 0.0, 1, 2", "1, 1, 9, 1e1", "1, 1, 9, -0.0", "1, 1, 9, 0." + "9" * 5000):
        assert read(f'{{"objects": [{{"desc": "a", "bbox_2d": [{hostile}]}}]}}', INTEGERS).drops == {"non_number": 1}
    polygon = '```json\n[{"poly": [1, 1, 9, 1, 9, 9], "label": "a"}]\n```'
    assert read(polygon, QWEN3_VL).drops == {"unexpected_keys": 1}
    assert read("[]", QWEN3_VL).invalid
    assert read("```json\n[]\n``", QWEN3_VL).truncated


def test_a_fenced_answer_is_written_as_the_model_writes_it():
    assert serialize_objects([box(12, 40, 310, 505, desc="house")] * 2, QWEN3_VL) == (
        '```json\n[\n\t{"bbox_2d": [12, 40, 310, 506], "label": "house"},'
        '\n\t{"bbox_2d": [12, 40, 310, 506], "label": "house"}\n]\n```'
    )
    assert serialize_objects([], QWEN3_VL) == "```json\n[]\n```"
    leaf = poly(100, 100, 300, 100, 300, 300)
    assert serialize_objects([leaf], INTEGERS) == (
        '{"objects": [{"desc": "leaf", "poly": [100, 100, 300, 100, 300, 300]}]}'
    )


def labels_of(sampled, *true, first=1):
    """Labels as text, of numbers that begin at character ``first``; ``.`` is none."""
    ids = VOCABULARY.encode(sampled)
    numbers, place = [], 0
    for number in true:
        start = next(k for k in range(place, len(sampled)) if sampled[k].isdigit())
        place = next(k for k in range(start, len(sampled)) if not sampled[k].isdigit())
        numbers.append(Correction(start, place, str(number)))
    found = label_corrections(ids, numbers, VOCABULARY)
    return "".join("." if label == IGNORED else VOCABULARY.piece(label).decode() for _, label, _ in found)


@pytest.mark.scenario(
    "supervision/a-wrong-digit-ends-the-supervision-of-its-number",
    "supervision/a-number-that-ends-too-early",
    "supervision/a-number-that-goes-on-too-long",
    "supervision/a-right-number-is-taught-with-its-delimiter",
    "supervision/the-next-number-starts-at-its-own-first-digit",
    clauses=["supervision/a-number-is-taught-up-to-where-it-leaves-the-truth#1,2"],
)
@pytest.mark.parametrize(
    ("sampled", "true", "labels"),
    [
        ("145,", (137,), "13.."),
        ("13,", (137,), "137"),
        ("1375,", (137,), "137,."),
        ("137,", (137,), "137,"),
        ("2,", (137,), "1."),
        ("145, 20]", (137, 26), "13..26."),
        ("7, 20]", (7, 2), "7,2]."),
    ],
)
def test_labels_of_numbers_by_hand(sampled, true, labels):
    assert labels_of(sampled, *true) == labels


@pytest.mark.scenario(
    "supervision/the-last-number-of-a-response-was-too-short",
    clauses=["supervision/a-number-is-taught-up-to-where-it-leaves-the-truth#5"],
)
@pytest.mark.parametrize(("true", "label"), [(137, b"7"), (13, b"]}]}")])
def test_a_delimiter_that_was_cut_off_is_taught_in_the_tail(true, label):
    response = FUSING.encode(serialize_objects([box(100, 5, 200, 13)], INTEGERS))
    assert FUSING.piece(response[-1]) == b"]}]}"
    segment, report = make(response, [box(100, 5, 200, true)], INTEGERS, FUSING, maskiou_gate=0.0)
    assert report.num_matched == 1
    supervision = mask_segment(segment, rules=MaskRules(), bin_of=FUSING.bin_of)
    assert FUSING.piece(supervision.labels[segment.prompt_len + segment.prefix_len]) == label


@pytest.mark.scenario(clauses=["supervision/a-number-is-taught-up-to-where-it-leaves-the-truth#2,3,4,5"])
@given(st.lists(boxes(), min_size=1, max_size=3), st.sampled_from(NUMBERS), vocabularies, st.data())
def test_a_label_continues_the_true_text_and_none_stands_behind_an_error(said, answer_format, vocabulary, data):
    moves = st.tuples(*[st.integers(-30, 30)] * 4)
    truth = [box(*_moved(each.bins, data.draw(moves)), desc="t") for each in said]
    response = vocabulary.encode(serialize_objects(said, answer_format))
    segment, report = make(response, truth, answer_format, vocabulary)
    supervision = mask_segment(segment, rules=MaskRules(), bin_of=vocabulary.bin_of)
    start, end = segment.prompt_len, segment.prompt_len + segment.prefix_len
    labels = {index - start: label for index, label in enumerate(supervision.labels[:end]) if label != IGNORED}
    assert labels.keys() <= {index - start for index in segment.corrected_positions}
    assert all(supervision.weights[start + index] == 1.0 for index in labels)
    target, allowed = segment.token_ids[start:-1], set()
    text, starts = vocabulary.decode(target), [0, *accumulate(len(vocabulary.piece(i)) for i in target)]
    for predicted, true in (
        matching_of(answer_format, vocabulary).match(make_sample(*truth), rollout_of(response)).pairs
    ):
        numbers = answer_format.numbers_of(Geometry.BBOX, true.bins)
        for (first, after), number in zip(predicted.spans, numbers, strict=True):
            true_text, delimiter = text[:first] + str(number).encode() + text[after:], first + len(str(number))
            for index, place in enumerate(starts[:-1]):
                is_of_number = starts[index + 1] > first and place <= max(after, delimiter)
                if is_of_number and place <= delimiter and text[:place] == true_text[:place] and index in labels:
                    fits = true_text[place:].startswith(vocabulary.piece(labels[index]))
                    allowed |= {index} if fits else set()
    assert labels.keys() <= allowed
    assert bool(labels) == (report.num_matched > 0)


def _moved(bins, by):
    left, top, right, bottom = (min(999, max(0, k + d)) for k, d in zip(bins, by, strict=True))
    left, top = min(left, 998), min(top, 998)
    return left, top, max(right, left + 1), max(bottom, top + 1)


def test_unmatched_numbers_and_their_neighbours_carry_no_labels():
    response = VOCABULARY.encode(serialize_objects([box(*FAR_BOX), box()], INTEGERS))
    segment, report = make(response, [box()], INTEGERS, VOCABULARY)
    assert (report.num_predicted, report.num_matched) == (2, 1)
    second = serialize_objects([box(*FAR_BOX), box()], INTEGERS).rindex("[") + 1
    first = len(VOCABULARY.decode(segment.token_ids[segment.prompt_len : min(segment.corrected_positions)]))
    assert first == second
    labels = b"".join(VOCABULARY.piece(label) for label in segment.corrected_labels)
    assert labels == b"100,100,300,300]"
    assert BOX == (100, 100, 300, 300)


@pytest.mark.scenario(clauses=["parsing/the-answer-format-decides-how-objects-are-written#8"])
@pytest.mark.parametrize("name", ["yolo", "no.such.module:Class", "json:JSONDecoder"])
def test_what_is_no_answer_format_is_refused(name):
    with refused("answer-format-unknown", "k"):
        load_answer_format(name, key="k")
    assert load_answer_format("conformance.doubles.answer_formats:Wordy", key="k").desc_key == "what"
    assert {load_answer_format(known, key="k").opening for known in ANSWER_FORMATS} == {'{"objects": [', "```json\n["}


@pytest.mark.parametrize("control", CONTROL_TOKENS[:3])
def test_a_control_token_ends_a_fenced_answer_too(control):
    text = serialize_objects([box()], QWEN3_VL)
    parsed = parse_rollout(VOCABULARY.encode(text + control + text), VOCABULARY, QWEN3_VL)
    assert (parsed.drops, parsed.truncated, len(parsed.objects)) == ({}, False, 1)
