"""What a served model answers, as boxes in pixels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.refusals import refused
from rollmatch import parse_answer
from rollmatch.objectives.rollout_matching.answer_format import ANSWER_FORMATS
from rollmatch.records import Geometry, GroundTruth

SIZE = 640, 481


def written(answer_format, *objects):
    return answer_format.opening + "".join(answer_format.join(list(map(answer_format.write, objects)), follows=False))


def box(desc, *bins):
    return GroundTruth(desc=desc, geometry=Geometry.BBOX, bins=bins)


@pytest.mark.parametrize("name", ANSWER_FORMATS)
@given(corners=st.lists(st.integers(0, 900), min_size=2, max_size=2), sides=st.lists(st.integers(20, 99), min_size=2))
def test_every_form_is_read_back_as_pixels(name, corners, sides):
    seen = (644, 476) if name == "qwen2_5_vl" else None
    (left, top), (wide, high) = corners, sides[:2]
    truth = box('a "cat" <|coord_7|', left, top, left + wide, top + high)
    text = written(ANSWER_FORMATS[name].fitted(*(seen or SIZE)), truth, truth)
    first, second = parse_answer(text, *SIZE, name, seen_size=seen)
    assert first == second
    assert first.desc == truth.desc
    expected = [k / 999 * (SIZE[place % 2] - 1) for place, k in enumerate(truth.bins)]
    assert first.box == pytest.approx(expected, abs=0.0 if name in ("coord_tokens", "integers") else 1.2)


def test_what_training_drops_is_left_out():
    corners = ", ".join(f'"<|coord_{k}|>"' for k in (10, 20, 30, 40))
    good = f'{{"desc": "dog", "bbox_2d": [{corners}]}}'
    bad = [good.replace("<|coord_30|>", word) for word in ("<|coord_1000|>", "<|coord_030|>", "30", "<|coord_5|>")]
    text = f'{{"objects": [{", ".join([bad[0], good, *bad[1:]])}, {good[:-3]}'
    assert [one.desc for one in parse_answer(text, *SIZE)] == ["dog"]
    leaf = good.replace("bbox_2d", "poly").replace('"<|coord_40|>"', '"<|coord_40|>", "<|coord_9|>", "<|coord_90|>"')
    (found,) = parse_answer(f'<think>where?\n\nThere.</think>{{"objects": [{leaf}]}}', 1000, 1000)
    assert found.polygon == (10, 20, 30, 40, 9, 90)
    assert found.box == (9, 20, 30, 90)
    assert parse_answer("I see a dog.", *SIZE) == parse_answer("", *SIZE) == []


def test_wrong_arguments_are_refused():
    with refused("not-a-choice", "answer_format", remedy="qwen3_vl"):
        parse_answer("", *SIZE, "qwen")
    with refused("missing-key", "seen_size"):
        parse_answer("", *SIZE, "qwen2_5_vl")
    with refused("argument-not-used", "seen_size"):
        parse_answer("", *SIZE, "qwen3_vl", seen_size=SIZE)
