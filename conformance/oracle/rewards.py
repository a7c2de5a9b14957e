"""Rewards of drawn runs: numbers from the answer's text alone, so that the oracle can pay without the product."""

import zlib


def spread(answer, sample):
    """0 to 1 in steps of 1/7: completions of a group differ, and some are alike."""
    return zlib.crc32(answer.encode()) % 8 / 7


def long(completions, answer_key=0, **columns):
    """In TRL's form: the length of the text, and nothing about every fifth answer."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [None if zlib.crc32(text.encode()) % 5 == 0 else len(text) / 10 for text in texts]


def fails(answer, sample):
    """As ``spread``; a fifth of the answers cannot be judged."""
    if zlib.crc32(answer.encode()) % 5 == 1:
        raise ValueError("not this one")
    return spread(answer, sample) - 0.5


def pay(answer: str, rewards: list[dict]) -> tuple[float | None, dict]:
    """The weighted sum of what the named functions say, None where none says anything; and what each says."""
    said = {}
    for one in rewards:
        name = one["function"].rpartition(":")[2]
        try:
            said[name] = long([answer])[0] if name == "long" else {"spread": spread, "fails": fails}[name](answer, None)
        except ValueError:
            said[name] = None
    weights = [one.get("weight", 1.0) for one in rewards]
    known = [weight * value for weight, value in zip(weights, said.values(), strict=True) if value is not None]
    return sum(known) if known else None, said
