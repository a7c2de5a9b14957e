"""Ids, their bytes, the coordinates among them; on the double and on the digits model's real tokenizer."""

import json
import unicodedata
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from conformance.doubles.refusals import refused
from conformance.doubles.tokenizer import CONTROL_TOKENS, make_tokenizer, make_vocabulary
from rollmatch.model.vocabulary import Vocabulary, coord_token, split_at_stop
from rollmatch.objectives.rollout_matching.answer_format import COORD_TOKENS, INTEGERS
from rollmatch.objectives.rollout_matching.target import check_exact
from rollmatch.records import NUM_BINS

STOP = "<|im_end|>"
DIGITS = Path(__file__).parents[3] / "fixtures/models/digits"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@cache
def digits():
    return Vocabulary.load(DIGITS)


def tokenizer_of(*, pieces=(), num_coords=NUM_BINS):
    """Every byte, some more pieces, the stop token and the first ``num_coords`` coordinates."""
    spelled = [*ALPHABET, *pieces]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(spelled)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    literals = [STOP, *(coord_token(k) for k in range(num_coords))]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in literals])
    return tokenizer


def save(tokenizer, folder):
    """As a model's directory holds it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def test_a_directory_without_tokenizer_is_refused_and_with_one_is_read(tmp_path):
    with refused("tokenizer-missing", "model.model"):
        Vocabulary.load(tmp_path)
    save(make_tokenizer(), tmp_path)
    assert Vocabulary.load(tmp_path).stop_id == make_vocabulary().stop_id


def test_truncation_and_padding_that_were_saved_with_a_tokenizer_play_no_part(tmp_path):
    tokenizer, text = make_tokenizer(), "abc " * 20
    plain = make_vocabulary().encode(text)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=500)
    save(tokenizer, tmp_path)
    assert len(plain) > 5
    assert Vocabulary.load(tmp_path).encode(text) == plain


@pytest.mark.scenario(
    "parsing/a-tokenizer-without-coordinate-tokens-is-refused", clauses=["parsing/an-answer-is-one-line-of-json#4"]
)
@pytest.mark.parametrize(
    ("tokenizer", "code", "problem"),
    [
        ({"num_coords": 0}, "coord-tokens-missing", "1000 of 1000"),
        ({"num_coords": 998}, "coord-tokens-missing", "2 of 1000"),
        ({"num_coords": 998}, "coord-tokens-missing", "<|coord_998|>"),
    ],
)
def test_a_tokenizer_without_coordinates_is_refused(tokenizer, code, problem):
    with refused(code, "model.model", problem=problem):
        Vocabulary(tokenizer_of(**tokenizer), stop_token=STOP)
    accepted = Vocabulary(tokenizer_of(pieces=["\u0120a", "##ing", "hello"]), stop_token=STOP)
    assert accepted.piece(accepted.tokenizer.token_to_id("\u0120a")) == b" a"
    assert (len(accepted), len(accepted.coord_ids)) == (256 + 3 + 1 + NUM_BINS, NUM_BINS)


@pytest.mark.scenario(
    "parsing/a-tokenizer-of-whole-words-is-refused",
    clauses=["parsing/a-tokenizer-that-changes-answers-is-refused-for-rollout-matching-only#1"],
)
@pytest.mark.filterwarnings("ignore:.*generation_config")
def test_a_tokenizer_of_whole_words_has_text_and_steps_but_no_answers():
    words = {"[UNK]": 0, "[SEP]": 1, "two": 2, "dogs": 3, "##s": 4, ".": 5}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    vocabulary = Vocabulary(tokenizer, stop_token="[SEP]", coordinates=False)
    ids = (*vocabulary.encode("two dogs."), vocabulary.stop_id)
    assert (vocabulary.text(ids), b"".join(vocabulary.pieces(ids))) == ("two dogs.", b"two dogs.")
    with refused("tokenizer-changes-answers", "model.model"):
        check_exact(vocabulary, INTEGERS)
    check_exact(digits(), COORD_TOKENS)


def test_who_needs_no_coordinates_may_have_none_or_all():
    assert Vocabulary(tokenizer_of(num_coords=0), stop_token=STOP, coordinates=False).coord_ids == ()
    with refused("coord-tokens-missing", "model.model", problem="999 of 1000"):
        Vocabulary(tokenizer_of(num_coords=1), stop_token=STOP, coordinates=False)


def test_an_unknown_stop_token_is_refused():
    with refused("stop-token-missing", "model.stop_token"):
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
    kept, stop = split_at_stop(response, stops)
    assert kept == tuple(takewhile(lambda token_id: token_id not in stops, response))
    assert response[len(kept) : len(kept) + 1] == ([] if stop is None else [stop])
