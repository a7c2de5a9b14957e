"""Splitters tile, and cut where they say."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.doubles.refusals import refused
from conformance.doubles.tokenizer import ids_of_bytes, make_vocabulary
from conformance.doubles.vineppo_locks import sample_of
from rollmatch.environments.trajectory import Trajectory, Turn, check_cuts, states_of
from rollmatch.objectives.vineppo.prose import sentence_starts
from rollmatch.objectives.vineppo.split import AtMost, FixedTokens, Lines, LowProbability, Sentences, Turns

VOCABULARY = make_vocabulary()
PROSE = st.text(alphabet="ab AB.\n$=,+\\[](){}xyz ", max_size=240)
SPLITTERS = {
    "lines": Lines(vocabulary=VOCABULARY, answer_mark="#### "),
    "sentences": Sentences(vocabulary=VOCABULARY),
    "fixed_tokens": FixedTokens(num_tokens=7),
    "low_probability": LowProbability(threshold=0.9, every=2),
    "turns": Turns(),
    "at most": AtMost(splitter=FixedTokens(num_tokens=1), num_steps=5),
}


def trajectory(token_ids, **fields):
    written = {"token_ids": tuple(token_ids), "rewards": ((len(token_ids), 1.0),), **fields}
    return Trajectory(sample=sample_of(), prompt_token_ids=(1,), policy_version=1, is_finished=True, **written)


def pieces(text, splitter, *, encode=VOCABULARY.encode):
    """The steps' texts, the stop token behind the last one."""
    ids = (*encode(text), VOCABULARY.stop_id)
    cuts = splitter.cuts(trajectory(ids))
    return [VOCABULARY.text(ids[a:b]).removesuffix("<|im_end|>") for a, b in pairwise(cuts)]


@pytest.mark.scenario("vineppo/steps-tile-a-response", clauses=["vineppo/states-are-prefixes-of-token-ids#1,2"])
@pytest.mark.parametrize("name", SPLITTERS)
@settings(max_examples=30)
@given(text=PROSE, seed=st.integers(0, 2**31))
def test_steps_tile_and_states_are_prefixes(name, text, seed):
    ids = (*VOCABULARY.encode(text), VOCABULARY.stop_id)
    turns = tuple(Turn(start=start, stop=start + 1, number=start // 3) for start in range(0, len(ids), 3))
    whole = trajectory(ids, logprobs=tuple(-np.random.default_rng(seed).exponential(size=len(ids))), turns=turns)
    cuts = SPLITTERS[name].cuts(whole)
    states = states_of(whole, cuts)
    steps = [ids[a:b] for a, b in pairwise(cuts)]
    assert all(steps)
    assert sum(steps, ()) == ids
    assert [state.prefix_token_ids for state in states] == [ids[:cut] for cut in cuts[:-1]]
    assert all(len(state.prefix_token_ids) < len(ids) for state in states)


def test_lines_begin_with_their_line_feed_and_turns_with_their_first_token():
    text = "\n\nfirst\nsecond\n\n\nthird\n#### 7"
    assert pieces(text, SPLITTERS["lines"]) == ["\n\nfirst", "\nsecond", "\n\n\nthird\n#### 7"]
    assert pieces(text, Lines(vocabulary=VOCABULARY))[-2:] == ["\n\n\nthird", "\n#### 7"]
    assert pieces("one line\n", SPLITTERS["lines"]) == ["one line\n"]
    assert pieces("", SPLITTERS["lines"]) == [""]
    fused = next(i for i in range(256, len(VOCABULARY)) if VOCABULARY.piece(i) == b'", "')
    ids = (*ids_of_bytes(b"a"), fused, *ids_of_bytes(b"\nb"))
    assert Lines(vocabulary=VOCABULARY).cuts(trajectory(ids)) == (0, 2, 4), "a token that a cut falls into stays whole"
    turns = (Turn(start=0, stop=2, number=0), Turn(start=3, stop=4, number=1))
    assert Turns().cuts(trajectory(ids_of_bytes(b"abcdef"), turns=turns)) == (0, 3, 6), "a turn ends with its reply"


def test_sentences_do_not_cut_formulas():
    text = (
        "First we note that $a. B = 3$ holds. Then J. Doe adds 1 to both sides.\n"
        "So \\[\nx = 4.\n\\] Which is what was wanted by the exercise."
    )
    assert pieces(text, SPLITTERS["sentences"]) == [
        "First we note that $a. B = 3$ holds.",
        " Then J. Doe adds 1 to both sides.",
        "\nSo \\[\nx = 4.\n\\]",
        " Which is what was wanted by the exercise.",
    ]
    short = pieces("Hm\nthis is a line of its own\nas is this one here", SPLITTERS["sentences"])
    assert short == ["Hm\nthis is a line of its own", "\nas is this one here"], "a short piece joins the next one"


def test_long_pieces_break_near_their_middle_first_in_words_then_in_mathematics():
    words = b"w" * 60 + b", " + b"v" * 62
    assert sentence_starts(words) == [62]
    formula = b"$" + b"x" * 70 + b"=" + b"y" * 70 + b"$"
    assert sentence_starts(formula) == [72]
    assert sentence_starts(b"$" + b"x" * 30 + b"\n" + b"y" * 80 + b"$") == [31], "at a line, not near the middle"
    assert sentence_starts(b"w" * 20 + b", " + b"v" * 100) == []
    assert sentence_starts(b"w" * 100 + b", " + b"v" * 20) == []


@pytest.mark.parametrize(
    ("too_short", "long_enough", "cut"),
    [
        (b"a" * 19 + b"\nrest", b"a" * 20 + b"\nrest", 20),
        (b"$" + b"x" * 20 + b"\n" + b"y" * 77 + b"$", b"$" + b"x" * 20 + b"\n" + b"y" * 78 + b"$", 21),
        (b"w" * 50 + b", " + b"v" * 48, b"w" * 50 + b", " + b"v" * 49, 52),
        (b"w" * 37 + b", " + b"v" * 80, b"w" * 38 + b", " + b"v" * 80, 40),
        (b"w" * 80 + b", " + b"v" * 39, b"w" * 80 + b", " + b"v" * 40, 82),
        (b"$" + b"x" * 17 + b"=" + b"y" * 90 + b"$", b"$" + b"x" * 18 + b"=" + b"y" * 90 + b"$", 20),
        (b"$" + b"x" * 90 + b"=" + b"y" * 18 + b"$", b"$" + b"x" * 90 + b"=" + b"y" * 19 + b"$", 92),
    ],
)
def test_a_piece_has_20_bytes_and_breaks_above_100_into_parts_of_40_or_in_mathematics_20(too_short, long_enough, cut):
    assert (sentence_starts(too_short), sentence_starts(long_enough)) == ([], [cut])


@pytest.mark.parametrize("cuts", [(), (0,), (0, 2), (1, 3), (0, 2, 2, 3), (0, 2, 1, 3)])
def test_cuts_that_do_not_tile_are_refused(cuts):
    with refused("steps-do-not-tile", "x:1"):
        check_cuts(trajectory((5, 6, 7)), cuts)
    check_cuts(trajectory((5, 6, 7)), (0, 2, 3))
