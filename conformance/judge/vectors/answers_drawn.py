"""Inputs about answers of a model: token lists to parse, prefixes to append to."""

import random
import re
from collections.abc import Iterator
from typing import Any

Token = str | dict[str, Any]
SPECIAL = re.compile(r"<\|coord_(\d+)\|>|<\|im_end\|>")
BOX, FAR = (12, 40, 310, 505), (600, 20, 900, 80)
STOP = {"control": "<|im_end|>"}


def tokens_of(text: str, rng: random.Random | None = None) -> list[Token]:
    """A text as tokens: special ones by name, the rest one token, or cut anywhere, in mid-character, too."""
    tokens: list[Token] = []
    place = 0
    for found in SPECIAL.finditer(text):
        tokens += _pieces(text[place : found.start()].encode(), rng)
        tokens.append({"coord": int(found[1])} if found[1] else STOP)
        place = found.end()
    return tokens + _pieces(text[place:].encode(), rng)


def _pieces(raw: bytes, rng: random.Random | None) -> list[Token]:
    cuts = sorted(rng.sample(range(1, len(raw)), min(len(raw) - 1, rng.randint(0, 4)))) if rng and len(raw) > 1 else []
    spans = zip([0, *cuts], [*cuts, len(raw)], strict=True)
    return [_token(raw[start:stop]) for start, stop in spans if stop > start]


def _token(raw: bytes) -> Token:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"hex": raw.hex()}


def quoted(bins: tuple[int, ...]) -> str:
    return ", ".join(f'"<|coord_{k}|>"' for k in bins)


def element(bins: tuple[int, ...] = BOX, desc: str = "cat", key: str = "bbox_2d") -> str:
    return f'{{"desc": "{desc}", "{key}": [{quoted(bins)}]}}'


def answer(*elements: str) -> str:
    return f'{{"objects": [{", ".join(elements)}]}}'


ODD_ELEMENTS = {
    "not_an_object": "7",
    "duplicate_key": f'{{"desc": "a", "desc": "b", "bbox_2d": [{quoted(BOX)}]}}',
    "unexpected_keys": f'{{"desc": "a", "score": 1, "bbox_2d": [{quoted(BOX)}]}}',
    "missing_desc": element(desc=" "),
    "missing_geometry": '{"desc": "a"}',
    "two_geometries": f'{{"desc": "a", "bbox_2d": [{quoted(BOX)}], "poly": [{quoted((1, 2, 9, 2, 9, 8))}]}}',
    "nested_geometry": f'{{"desc": "a", "bbox_2d": [[{quoted(BOX)}]]}}',
    "wrong_arity": element((1, 2, 3)),
    "non_coord_token": '{"desc": "a", "bbox_2d": [1, 2, 3, 4]}',
    "bbox_degenerate": element((5, 5, 5, 9)),
    "poly_degenerate": element((0, 0, 1, 1, 2, 2), key="poly"),
}
TEXTS = {
    "well-formed": answer(element(), element(FAR, "dog")),
    "no object": answer(),
    "white space": '{ "objects" :[ ' + element() + " ,\n" + element(FAR) + "]\t}",
    "empty": "",
    "prose": "Here are the objects: " + answer(element()),
    "another first key": '{"items": []}',
    "cut in the opening": '{"obj',
    "cut in an element": answer(element(), element(FAR))[:-30],
    "cut after a comma": '{"objects": [' + element() + ", ",
    "cut before the end": '{"objects": [' + element(),
    "trailing text": answer(element()) + " done",
    "no comma": '{"objects": [' + element() + element(FAR) + "]}",
    "malformed": '{"objects": [' + element() + ", {desc}]}",
    "a number may go on": '{"objects": [12',
    "NaN": '{"objects": [NaN, ' + element() + "]}",
    "too deep": '{"objects": [' + "[" * 33 + "]" * 33 + "]}",
    "as deep as may be": '{"objects": [' + "[" * 32 + "]" * 32 + "]}",
    "stops in the middle": '{"objects": [' + element() + "<|im_end|>, " + element(FAR) + "]}",
    "a polygon, accents and quotes": answer(element((1, 2, 9, 2, 9, 8), 'caf\u00e9 \\"x\\" \U0001f600', "poly")),
    "an escaped description": answer(element(desc="\\u00e9")),
}
NUMBERS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "integers": (
        [
            '{"objects": [{"desc": "cat", "bbox_2d": [12, 40, 310, 505]}, ',
            '{"desc": "a", "bbox_2d": [1, 2, 3, 1000]}]}',
        ],
        {},
    ),
    "qwen3_vl": (
        [
            '```json\n[\n\t{"bbox_2d": [0, 501, 1000, 502], "label": "cat"},\n\t',
            '{"bbox_2d": [1, 2, 3.0, 4], "label": "a"}\n]\n```',
        ],
        {},
    ),
    "qwen2_5_vl": (
        [
            '```json\n[\n\t{"bbox_2d": [0, 50, 100, 99], "label": "cat"},\n\t',
            '{"bbox_2d": [0, 0, 50, 102], "label": "b"}\n]\n```',
        ],
        {"image": [101, 101]},
    ),
}


def parse_inputs(rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    for shows, text in TEXTS.items():
        yield shows, {"format": "coord_tokens", "tokens": tokens_of(text)}
    for reason, odd in ODD_ELEMENTS.items():
        yield f"dropped: {reason}", {"format": "coord_tokens", "tokens": tokens_of(answer(odd, element()))}
    head, close = tokens_of('{"objects": ['), tokens_of(element())[:-1]
    yield "a token that closes too early", {"format": "coord_tokens", "tokens": [*head, *close, '"]}]}']}
    spelled = [{"hex": b"<|coord_40|>".hex()} if token == {"coord": 40} else token for token in close]
    yield "a coordinate in ordinary letters", {"format": "coord_tokens", "tokens": [*head, *spelled, '"]}]}']}
    yield "undecodable bytes", {"format": "coord_tokens", "tokens": [*head, {"hex": "ff"}, "]}"]}
    yield (
        "a token without bytes",
        {"format": "coord_tokens", "tokens": [*head, *tokens_of(element()), {"hex": ""}, "]}"]},
    )
    yield "a character cut short", {"format": "coord_tokens", "tokens": ['{"objects": [{"desc": "', {"hex": "c3"}]}
    for name, (parts, image) in NUMBERS.items():
        yield name, {"format": name, "tokens": parts, **image}
    for _ in range(16):
        elements = [
            rng.choice([element(_bins(rng), "caf\u00e9"), *ODD_ELEMENTS.values()]) for _ in range(rng.randint(0, 2))
        ]
        text = answer(*elements, element(_bins(rng)))
        text = text[: rng.randint(14, len(text))] if rng.random() < 0.4 else text
        yield "", {"format": "coord_tokens", "tokens": tokens_of(text, rng)}


def _bins(rng: random.Random) -> tuple[int, int, int, int]:
    left, top = rng.randint(0, 500), rng.randint(0, 500)
    return left, top, rng.randint(left + 1, 999), rng.randint(top + 1, 999)


def append_inputs(rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    def given(missed: list[Any], num: int, cut: bytes = b"", name: str = "coord_tokens", **more: Any) -> dict[str, Any]:
        return {"format": name, "cut_head": cut.hex(), "num_elements": num, "missed": missed, **more}

    cat = {"desc": "cat", "geometry": "bbox_2d", "bins": list(BOX)}
    leaf = {"desc": "caf\u00e9", "geometry": "poly", "bins": [1, 2, 9, 2, 9, 8]}
    yield "nothing missed", given([], 2)
    yield "nothing missed, empty list", given([], 0)
    yield "the first element needs no comma", given([cat], 0)
    yield "an element needs a comma", given([cat, leaf], 1)
    yield "after a cut head", given([cat], 1, b'"]}')
    yield "a cut head that begins in mid-character", given([cat], 1, b'\xa9"}')
    yield "an answer of which nothing was kept", given([cat], 0, b'{"objects": [')
    yield "a description with quotes", given([cat | {"desc": 'a "b" \\'}], 1)
    yield "a description that spells a coordinate", given([cat | {"desc": "<|coord_5|>"}], 1)
    yield "a description that spells the stop token", given([cat | {"desc": "a<|im_end|>"}], 1)
    yield "numbers", given([cat, leaf], 1, name="integers")
    yield "fenced, a polygon becomes its box", given([cat, leaf], 0, name="qwen3_vl")
    yield "fenced, nothing missed", given([], 1, name="qwen3_vl")
    yield (
        "pixels, at least one wide",
        given([cat | {"bins": [500, 998, 501, 999]}], 1, name="qwen2_5_vl", image=[101, 101]),
    )
    for _ in range(8):
        missed = [
            cat | {"desc": rng.choice(("cat", "\u00e9t\u00e9", "a b")), "bins": list(_bins(rng))}
            for _ in range(rng.randint(0, 3))
        ]
        name = rng.choice(("coord_tokens", "integers", "qwen3_vl"))
        yield "", given(missed, rng.randint(0, 2), name=name)
