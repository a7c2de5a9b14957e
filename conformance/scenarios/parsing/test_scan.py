"""What is JSON and what is not, decided element by element."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmatch.objectives.rollout_matching.answer_format import COORD_TOKENS
from rollmatch.objectives.rollout_matching.parse import Ending, expect, scan_elements

RICH = (
    r'{"objects": [{"a": "x\"\\\n\ud83d\ude00", "b": [-1.5e+3, true, false, null, {"c": {}}]}, 7, "s", [], 1 , -0.5]}'
)


def scan(text):
    opened, ending = expect(text, 0, COORD_TOKENS.opening_marks)
    return scan_elements(text, opened) if ending is Ending.CLOSED else ([], ending)


def count_whole_elements(text):
    """Brute force: the most elements any head of the text holds as JSON, a bare word at its end not counted."""
    heads = (text[:end] for end in range(len(text), 0, -1))
    for head in heads:
        if head[-1] not in '}]"[' and text[len(head) : len(head) + 1] not in [*" ,]\n\t\r"]:
            continue
        try:
            values = json.loads(head + "]}", parse_constant=lambda name: [][0])
        except (ValueError, IndexError):
            continue
        return len(values["objects"])
    return 0


@pytest.mark.parametrize("end", range(len(RICH)))
def test_every_head_of_a_proper_answer_is_truncated_and_keeps_its_whole_elements(end):
    elements, ending = scan(RICH[:end])
    assert ending is Ending.TRUNCATED
    assert len(elements) == count_whole_elements(RICH[:end])
    elements, ending = scan(RICH)
    assert (len(elements), ending) == (6, Ending.CLOSED)


@pytest.mark.scenario(
    "parsing/a-missing-comma-ends-the-reading",
    "parsing/a-list-of-33-levels-is-not-read",
    clauses=["parsing/nothing-is-repaired#3,4"],
)
@pytest.mark.parametrize(
    ("rest", "num_elements", "repaired"),
    [
        ("1 2]}", 1, "1, 2]}"),
        ("1,]}", 1, "1]}"),
        (",1]}", 0, "1]}"),
        ("'a']}", 0, '"a"]}'),
        ('{"a" "b"}]}', 0, '{"a": "b"}]}'),
        ("NaN]}", 0, "1]}"),
        ("-Infinity]}", 0, "-1]}"),
        ("nul]}", 0, "null]}"),
        ("12x]}", 0, "12]}"),
        ("012]}", 0, "12]}"),
        ('"a\nb"]}', 0, '"a\\nb"]}'),
        ('"\\x"]}', 0, '"\\\\x"]}'),
        ('"\\u12g4"]}', 0, '"\\u12a4"]}'),
        ("9" * 5000 + "]}", 0, "9" * 50 + "]}"),
        ("[" * 32 + "0" + "]" * 32 + "]}", 0, "[" * 31 + "0" + "]" * 31 + "]}"),
        ("[" * 200_000, 0, "[]]}"),
        ("[]}", 1, "[]]}"),
        ("1\f]}", 0, "1\t]}"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_is_not_json_ends_the_scan(rest, num_elements, repaired):
    elements, ending = scan('{"objects": [' + rest)
    assert (len(elements), ending) == (num_elements, Ending.MALFORMED)
    assert scan('{"objects": [' + repaired)[1] is Ending.CLOSED


@pytest.mark.parametrize("trailing", ["x", "{}", '{"objects": []}', "]", "}", "\0", "\ufffd"])
def test_anything_after_the_closing_is_trailing_text(trailing):
    assert scan('{"objects": [1]}' + trailing)[1] is Ending.TRAILING_TEXT
    assert scan('{"objects": [1]} \n')[1] is Ending.CLOSED
    elements, ending = scan('{"objects": [1], "objects": [2, 3]}')
    assert ([each.value for each in elements], ending) == ([1], Ending.TRAILING_TEXT)


@pytest.mark.scenario("parsing/white-space-before-the-brace-is-legal")
def test_white_space_is_legal_everywhere():
    elements, ending = scan(' {\n"objects"\t:\r[ 1 , 2 ] } ')
    assert ([each.value for each in elements], ending) == ([1, 2], Ending.CLOSED)


@pytest.mark.parametrize("text", ["I see a seven.", "[]", '{"object": []', r'{"\u006fbjects": []}', "\ufeff{", "{]"])
def test_another_opening_is_no_opening(text):
    assert scan(text) == ([], Ending.TRAILING_TEXT)
    assert scan('{"objects": []}') == ([], Ending.CLOSED)


@given(st.text('{}[],:"\\u1eE.- \ntfn', max_size=25))
def test_the_scan_finds_what_brute_force_finds(rest):
    text = '{"objects": [' + rest
    elements, _ = scan(text)
    assert len(elements) == count_whole_elements(text)
    assert [text[each.start : each.end].strip() for each in elements] == [text[e.start : e.end] for e in elements]
