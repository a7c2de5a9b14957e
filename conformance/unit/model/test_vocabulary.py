"""Ids, their bytes, the coordinates among them; on the double and on the digits model's real tokenizer."""

import json
import unicodedata
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from conformance.doubles.refusals import refused
from conformance.doubles.tokenizer import CONTROL_TOKENS, make_tokenizer, make_vocabulary
from rollmatch.model.vocabulary import Vocabulary, coord_token, trim_stop
from rollmatch.records import NUM_BINS

DIGITS = Path(__file__).parents[3] / "fixtures/models/digits"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@cache
def digits():
    return Vocabulary.load(DIGITS)


def tokenizer_of(*, pieces=(), without=(), num_coords=NUM_BINS):
    """Every byte but ``without``, some more pieces, the stop token and the first ``num_coords`` coordinates."""
    spelled = [*(character for character in ALPHABET if character not in without), *pieces]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(spelled)}, merges=[]))
    literals = ["<|im_end|>", *(coord_token(k) for k in range(num_coords))]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in literals])
    return tokenizer


def test_a_directory_without_tokenizer_is_refused_and_with_one_is_read(tmp_path):
    with refused("tokenizer-missing", "model.model"):
        Vocabulary.load(tmp_path)
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert Vocabulary.load(tmp_path).stop_id == make_vocabulary().stop_id


def test_truncation_and_padding_that_were_saved_with_a_tokenizer_play_no_part(tmp_path):
    tokenizer, text = make_tokenizer(), "abc " * 20
    plain = Vocabulary(make_tokenizer()).encode(text)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(plain) > 5
    assert Vocabulary.load(tmp_path).encode(text) == plain


@pytest.mark.scenario(
    "parsing/a-tokenizer-without-coordinate-tokens-is-refused", clauses=["parsing/an-answer-is-one-line-of-json#4"]
)
@pytest.mark.parametrize(
    ("tokenizer", "code", "problem"),
    [
        ({"pieces": ["\u2581a"]}, "tokenizer-not-byte-level", "'\u2581a'"),
        ({"pieces": ["##ing", "hello"], "without": ["\u0120"]}, "tokenizer-not-byte-level", "0x20"),
        ({"num_coords": 0}, "coord-tokens-missing", "1000 of 1000"),
        ({"num_coords": 998}, "coord-tokens-missing", "2 of 1000"),
        ({"num_coords": 998}, "coord-tokens-missing", "<|coord_998|>"),
    ],
)
def test_a_tokenizer_of_other_pieces_or_without_coordinates_is_refused(tokenizer, code, problem):
    with refused(code, "model.model", problem=problem):
        Vocabulary(tokenizer_of(**tokenizer))
    accepted = Vocabulary(tokenizer_of(pieces=["\u0120a", "##ing", "hello"]))
    assert accepted.piece(accepted.tokenizer.token_to_id("\u0120a")) == b" a"
    assert (len(accepted), len(accepted.coord_ids)) == (256 + 3 + 1 + NUM_BINS, NUM_BINS)


def test_who_needs_no_coordinates_may_have_none_or_all():
    assert Vocabulary(tokenizer_of(num_coords=0), coordinates=False).coord_ids == ()
    with refused("coord-tokens-missing", "model.model", problem="999 of 1000"):
        Vocabulary(tokenizer_of(num_coords=1), coordinates=False)


def test_an_unknown_stop_token_is_refused():
    with refused("stop-token-missing", "model.model"):
        Vocabulary(make_tokenizer(), stop_token="<|im_stop|>")
    accepted = Vocabulary(make_tokenizer(), stop_token="<|endoftext|>")
    assert accepted.piece(accepted.stop_id) == b"<|endoftext|>"


@pytest.mark.parametrize("make", [make_vocabulary, digits])
def test_bins_and_coordinate_ids_are_each_others_inverse(make):
    vocabulary = make()
    assert [vocabulary.bin_of(token_id) for token_id in vocabulary.coord_ids] == list(range(NUM_BINS))
    assert [vocabulary.piece(vocabulary.coord_ids[k]) for k in (0, 999)] == [b"<|coord_0|>", b"<|coord_999|>"]
    others = set(range(len(vocabulary) + 9)) - set(vocabulary.coord_ids)
    assert {vocabulary.bin_of(token_id) for token_id in others} == {None}
    added = set(vocabulary.tokenizer.get_added_tokens_decoder())
    assert vocabulary.control_ids == added - set(vocabulary.coord_ids), "other added tokens are control"
    assert set(filter(vocabulary.is_control, range(len(vocabulary)))) == vocabulary.control_ids
    assert vocabulary.is_control(vocabulary.stop_id)


def test_ids_that_only_pad_the_embedding_have_no_piece_and_are_control():
    num_rows = json.loads((DIGITS / "config.json").read_text())["text_config"]["vocab_size"]
    padding = range(len(digits()), num_rows)
    assert len(padding) > 0
    assert {digits().piece(token_id) for token_id in padding} == {b""}
    assert all(map(digits().is_control, padding))
    assert not digits().is_control(digits().encode("a")[0])
    assert digits().piece(len(digits()) - 1) != b""


@st.composite
def tails(draw, normalize):
    """The end of a text's UTF-8, from any byte on; the text may hold literals of added tokens."""
    parts = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from([*CONTROL_TOKENS, coord_token(3)])
    raw = normalize("".join(draw(st.lists(parts, max_size=4)))).encode()
    return raw[draw(st.integers(0, len(raw))) :]


@given(tails(str))
def test_any_tail_of_a_text_comes_back_from_its_ids(raw):
    assert digits().decode(digits().encode_bytes(raw)) == raw


@given(tails(lambda text: unicodedata.normalize("NFC", text)))
def test_any_tail_of_a_normalised_text_comes_back_through_a_normalizer(raw):
    assert make_vocabulary().decode(make_vocabulary().encode_bytes(raw)) == raw


def test_bytes_in_mid_character_come_first_and_the_rest_is_tokenised_as_ever():
    leading, rest = "\u20ac".encode()[1:], '"]}]}'
    ids = make_vocabulary().encode_bytes(leading + rest.encode())
    assert [make_vocabulary().piece(token_id) for token_id in ids[:2]] == [b"\x82", b"\xac"]
    assert ids[2:] == make_vocabulary().encode(rest)
    ids = make_vocabulary().encode_bytes(b"\xa9!")
    assert (make_vocabulary().decode(ids), make_vocabulary().text(ids)) == (b"\xa9!", "\ufffd!")


@given(st.lists(st.integers(0, 9)), st.sets(st.integers(0, 9), max_size=3))
def test_the_first_stop_token_and_all_after_it_go(response, stops):
    assert trim_stop(response, stops) == tuple(takewhile(lambda token_id: token_id not in stops, response))
    assert trim_stop(response, iter(stops)) == trim_stop(response, stops)
