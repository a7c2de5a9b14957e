"""Real tokenizers: ends of turn, what people read, what rollout matching reads, the joint of prefix and tail."""

import json
from functools import cache

import pytest

from conformance.doubles.refusals import refused
from conformance.tools.tokenizers import REAL, fetch_tokenizer
from rollmatch.model.vocabulary import Vocabulary, load_tokenizer
from rollmatch.objectives.rollout_matching.answer_format import ANSWER_FORMATS
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.target import append_missed, serialize_objects
from rollmatch.records import Geometry, GroundTruth

NAMES = [name for name in REAL if name != "tekken"]
TEXTS = (
    "ok 4",
    " two  spaces, a\ttab\nand lines\n\n",
    "caf\u00e9 \u20ac \U0001f600 \u5b57",
    "<think>\n\n</think>\n\nok 4",
    '{"objects": [{"desc": "black cat", "bbox_2d": [12, 40, 310, 505]}]}',
    '```json\n[\n\t{"bbox_2d": [1, 22, 310, 1000], "label": "cat"}\n]\n```',
    "<table>\n\n\n<strong>a</strong>     b</table> can't, we'll .",
)


def box(*bins, desc="cat"):
    return GroundTruth(desc=desc, geometry=Geometry.BBOX, bins=bins)


OBJECTS = (box(12, 40, 310, 505), box(1, 2, 30, 999, desc="a dog"), box(100, 200, 300, 400, desc="\u00e9 7"))


@cache
def tokenizer(name):
    return load_tokenizer(fetch_tokenizer(name))


@cache
def vocabulary(name):
    return Vocabulary.of(tokenizer(name), fetch_tokenizer(name), coordinates=False)


def test_a_tokenizer_without_a_fast_form_is_refused_by_name():
    with refused("tokenizer-not-fast", "model.model", problem="MistralCommonBackend"):
        Vocabulary.load(fetch_tokenizer("tekken"), coordinates=False)


ENDS = {
    "qwen3": ("<|im_end|>", "<|endoftext|>"),
    "qwen3_vl": ("<|im_end|>", "<|endoftext|>"),
    "smollm2": ("<|im_end|>",),
    "llama3": ("<|eot_id|>", "<|end_of_text|>"),
    "llama3_1": ("<|eot_id|>", "<|end_of_text|>", "<|reserved_special_token_4|>"),
    "gemma3": ("<end_of_turn>", "<eos>"),
    "deepseek_v3": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    "mistral_nemo": ("</s>",),
    "mistral_v3": ("</s>",),
    "llama2": ("</s>",),
    "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),
}
"""The primary one first. The npm package calls Llama 3.1's ``<|eom_id|>`` by an older name."""


@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_a_real_model_are_those_of_its_chat_and_of_its_generation_config(name):
    assert vocabulary(name).stop_texts == ENDS[name]


@pytest.mark.scenario(
    "rollout-backends/the-end-of-a-turn-is-no-part-of-the-text",
    clauses=["rollout-backends/text-is-what-transformers-writes#1,2,3"],
)
@pytest.mark.parametrize("name", NAMES)
def test_text_is_what_transformers_writes(name):
    """TRL decodes completions by the same call; special tokens are left out, ordinary added tokens stay."""
    ours, theirs = vocabulary(name), tokenizer(name)
    for text in TEXTS:
        ids = [*theirs.encode(text, add_special_tokens=False), *sorted(ours.stop_ids)]
        assert list(ours.encode(text)) == ids[: -len(ours.stop_ids)]
        assert ours.text(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert not any(map(ours.is_control, ids[: -len(ours.stop_ids)]))
    assert ours.is_control(len(theirs) + 9), "no such token"


@pytest.mark.parametrize("name", NAMES)
def test_pieces_are_the_bytes_of_a_text_also_where_it_begins_inside_another(name):
    ours = vocabulary(name)
    for text in TEXTS:
        assert ours.decode(ours.encode_bytes(text.encode())) == text.encode()
        assert b"".join(ours.pieces(ours.encode_bytes(text.encode()))) == text.encode()
    assert ours.decode(ours.encode_bytes("\u20ac!".encode()[1:])) == "\u20ac!".encode()[1:]


@pytest.mark.scenario(
    "target/an-answer-that-real-tokenizers-close-and-continue-by-other-tokens",
    clauses=["target/the-target-is-the-prefix-the-missed-objects-and-the-end#5"],
)
def test_qwen3_closes_an_answer_by_other_tokens_than_it_continues_it():
    ours, written = vocabulary("qwen3"), ANSWER_FORMATS["integers"]
    closed = ours.encode(serialize_objects(OBJECTS[:1], written))
    assert [ours.piece(token_id) for token_id in closed[-3:]] == [b"5", b"]}", b"]}"]
    tail = append_missed(parse_rollout(closed, ours, written), OBJECTS[1:2], ours, written)
    assert tail.num_kept == len(closed) - 2
    assert [ours.piece(token_id) for token_id in tail.token_ids[:2]] == [b"]},", b' {"']


@pytest.mark.parametrize("form", ["integers", "qwen3_vl"])
@pytest.mark.parametrize("name", NAMES)
def test_prefix_and_tail_are_one_text_in_the_tokenizers_own_ids(name, form):
    """An answer of any length, cut anywhere; no token with a number or a word of the answer is written again."""
    ours, written = vocabulary(name), ANSWER_FORMATS[form]
    for num_found, num_missed in ((0, 1), (1, 0), (1, 1), (2, 1), (3, 2)):
        answer = ours.encode_bytes(serialize_objects(OBJECTS[:num_found], written).encode())
        for cut in range(len(answer) + 1):
            parsed = parse_rollout(answer[:cut], ours, written)
            tail = append_missed(parsed, OBJECTS[:num_missed], ours, written)
            kept, again = parsed.prefix_token_ids[: tail.num_kept], parsed.prefix_token_ids[tail.num_kept :]
            ids = (*kept, *tail.token_ids[:-1])
            assert ours.decode(ids).decode() == parsed.prefix_text + tail.text
            assert ids == ours.encode_bytes(ours.decode(ids))
            assert not any(character.isalnum() for character in ours.decode(again).decode())


@pytest.mark.scenario(
    "parsing/an-answer-behind-an-empty-thought-is-read", clauses=["parsing/a-thought-before-the-answer-is-context#1"]
)
def test_a_thought_before_the_answer_is_context():
    ours, written = vocabulary("qwen3"), ANSWER_FORMATS["integers"]
    answer = serialize_objects(OBJECTS[:2], written)
    parsed = parse_rollout(ours.encode(f"<think>\n\n</think>\n\n{answer}"), ours, written)
    assert [(one.desc, one.bins) for one in parsed.objects] == [(one.desc, one.bins) for one in OBJECTS[:2]]
    assert json.loads(parsed.prefix_text.partition("</think>")[2] + append_missed(parsed, (), ours, written).text)
    assert parse_rollout(ours.encode(f"I see {answer}"), ours, written).invalid, "other text is none"
