"""Real tokenizers: ends of turn, what people read, what rollout matching reads, the joint of prefix and tail."""

import json
from functools import cache

import pytest

from conformance.doubles.refusals import refused
from conformance.doubles.tokenizer_checks import OBJECTS, TEXTS, check_joint, check_text, every_kind
from conformance.tools.tokenizers import REAL, fetch_tokenizer
from rollmatch.model.vocabulary import Vocabulary, load_tokenizer
from rollmatch.objectives.rollout_matching.answer_format import ANSWER_FORMATS
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.target import append_missed, serialize_objects

NAMES = [name for name in REAL if name != "tekken"]


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


@pytest.mark.parametrize("name", every_kind(ENDS))
def test_the_ends_of_a_real_model_are_those_of_its_chat_and_of_its_generation_config(name):
    assert vocabulary(name).stop_texts == ENDS[name]


@pytest.mark.scenario(
    "rollout-backends/the-end-of-a-turn-is-no-part-of-the-text",
    clauses=["rollout-backends/text-is-what-transformers-writes#1,2,3"],
)
@pytest.mark.parametrize("name", every_kind(NAMES))
def test_text_is_what_transformers_writes(name):
    """TRL decodes completions by the same call."""
    check_text(vocabulary(name), tokenizer(name))


@pytest.mark.parametrize("name", every_kind(NAMES))
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
@pytest.mark.parametrize("name", every_kind(NAMES))
def test_prefix_and_tail_are_one_text_in_the_tokenizers_own_ids(name, form):
    check_joint(vocabulary(name), form)


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
