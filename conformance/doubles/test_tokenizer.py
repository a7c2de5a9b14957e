"""The double is what its docstring says, and what real byte-level tokenizers are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.tokenizer import CONTROL_TOKENS, FUSED, ids_of_bytes, make_tokenizer, make_vocabulary
from rollmatch.model.vocabulary import coord_token
from rollmatch.records import NUM_BINS


@pytest.mark.parametrize("fused", [fused for fused in FUSED if fused[0] < 0x80])
def test_fused_punctuation_is_one_token(fused):
    vocabulary = make_vocabulary()
    assert [vocabulary.piece(i) for i in vocabulary.encode(fused.decode())] == [fused]


def test_a_token_may_begin_in_mid_character():
    vocabulary = make_vocabulary()
    assert [vocabulary.piece(i) for i in vocabulary.encode('\u00e9"}]}')] == [b"\xc3", b'\xa9"}]}']


def test_every_coordinate_and_control_literal_is_one_token():
    vocabulary = make_vocabulary()
    assert all(len(vocabulary.encode(coord_token(k))) == 1 for k in range(NUM_BINS))
    assert {vocabulary.encode(text)[0] for text in CONTROL_TOKENS} == vocabulary.control_ids


@given(st.binary(max_size=20))
def test_one_token_per_byte_decodes_to_the_bytes(raw):
    assert make_vocabulary().decode(ids_of_bytes(raw)) == raw
    assert len(ids_of_bytes(raw)) == len(raw)


def test_it_survives_a_save(tmp_path):
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    loaded = type(make_vocabulary()).load(tmp_path)
    assert loaded.encode('"]}]}<|coord_7|>') == make_vocabulary().encode('"]}]}<|coord_7|>')
