"""What holds for every real tokenizer and chat template: text, the joint of prefix and tail, calls of tools."""

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import pytest

from rollmatch.model.template import Template
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.rollout_matching.answer_format import ANSWER_FORMATS
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.target import append_missed, serialize_objects
from rollmatch.records import Geometry, GroundTruth, Sample

KINDS = ("qwen3", "gemma3", "llama2", "mistral_v3", "gptoss")
"""Real tokenizers of each kind, which are tried every day; the others where ``wide`` tests run."""


def every_kind(names: Iterable[str]) -> list[Any]:
    """The names as parameters of a test."""
    return [pytest.param(name, marks=[pytest.mark.wide] * (name not in KINDS)) for name in names]


TEXTS = (
    "ok 4",
    " two  spaces, a\ttab\nand lines\n\n",
    "caf\u00e9 \u20ac \U0001f600 \u5b57",
    "<think>\n\n</think>\n\nok 4",
    '{"objects": [{"desc": "black cat", "bbox_2d": [12, 40, 310, 505]}]}',
    '```json\n[\n\t{"bbox_2d": [1, 22, 310, 1000], "label": "cat"}\n]\n```',
    "<table>\n\n\n<strong>a</strong>     b</table> can't, we'll .",
)


def box(*bins: int, desc: str = "cat") -> GroundTruth:
    return GroundTruth(desc=desc, geometry=Geometry.BBOX, bins=bins)


OBJECTS = (box(12, 40, 310, 505), box(1, 2, 30, 999, desc="a dog"), box(100, 200, 300, 400, desc="\u00e9 7"))
ADD = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"first": {"type": "integer", "description": "One."}}},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add_numbers", "arguments": {"first": 8642}}}
CALLED = Sample(
    sample_id=0,
    origin="x.jsonl:7",
    images=(),
    messages=(("user", "Add to it."), ("assistant", ""), ("tool", "97531")),
    message_fields=({}, {"tool_calls": [CALL]}, {"tool_call_id": CALL["id"], "name": "add_numbers"}),
    tools=(ADD,),
)
"""A call of a tool and its result; the id has the nine characters that Mistral's templates ask for."""


def check_text(ours: Vocabulary, theirs) -> None:
    """Text is what transformers writes; special tokens are left out, ordinary added tokens stay."""
    for text in TEXTS:
        ids = [*theirs.encode(text, add_special_tokens=False), *sorted(ours.stop_ids)]
        assert list(ours.encode(text)) == ids[: -len(ours.stop_ids)]
        assert ours.text(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert not any(map(ours.is_control, ids[: -len(ours.stop_ids)]))
    assert ours.is_control(len(theirs) + 9), "no such token"


def tokens_with(inside: set[int], token_ids: Iterable[int], vocabulary: Vocabulary) -> tuple[int, ...]:
    """Places of the tokens that hold any of these bytes of their text."""
    ends = list(accumulate((len(vocabulary.piece(token_id)) for token_id in token_ids), initial=0))
    return tuple(place for place, span in enumerate(pairwise(ends)) if not inside.isdisjoint(range(*span)))


def check_joint(ours: Vocabulary, form: str) -> None:
    """An answer of any length, cut anywhere, is continued in the tokenizer's own ids.

    No token with a number or a word of the answer is written again; descriptions are where the tail says.
    """
    written = ANSWER_FORMATS[form]
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
            raw, descs = ours.decode(tail.token_ids[:-1]), [each.desc.encode() for each in OBJECTS[:num_missed]]
            spans = [(raw.index(b'"%s"' % desc) + 1, len(desc)) for desc in descs]
            inside = {byte for first, length in spans for byte in range(first, first + length)}
            assert tail.desc_positions == tokens_with(inside, tail.token_ids[:-1], ours)


def check_tools(template: Template) -> None:
    """The prompt holds tools, a call and its result."""
    text = template.vocabulary.text(template.prompt_token_ids(CALLED))
    assert all(part in text for part in ("add_numbers", "8642", "97531")), "a part of the call is left out"
