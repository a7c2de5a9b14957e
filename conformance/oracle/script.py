"""What the scripted servers of drawn runs write: it follows from prompt, seed and limit alone, so nobody has to ask."""

import random
import struct

BOXES = [(100, 100, 300, 300), (120, 90, 310, 320), (500, 400, 900, 800), (510, 420, 880, 790), (0, 0, 999, 60)]
NAMES = ["cat", "dog", "é"]


def write(words, prompt, seed, limit, variant):
    """(ids with the stop token, log-probabilities in float32) that a server makes of a request."""
    chance = random.Random(f"{seed} {list(prompt)}")
    if variant == "rollout_matching_sft":
        ids = _answer(words, chance)
    else:
        ids = words.ids("".join(chance.choices("ab 1\n.", k=chance.choice((0, *range(1, limit + 2))))))
    ids = [*ids, words.stop][:limit]
    return ids, [struct.unpack("f", struct.pack("f", chance.uniform(-8, -6)))[0] for _ in ids]


def _answer(words, chance):
    """An answer in the form of ``coord_tokens``, often with something wrong in it."""
    parts = []
    for _ in range(chance.randint(0, 3)):
        box = [f'"<|coord_{min(999, b + chance.choice((0, 0, 3)))}|>"' for b in chance.choice(BOXES)]
        text = f'{{"desc": "{chance.choice(NAMES)}", "bbox_2d": [{", ".join(box)}]}}'
        wrong = chance.random()
        if wrong < 0.1:
            text = chance.choice(("7", '{"desc": "", "bbox_2d": []}', text.replace("desc", "score", 1)))
        elif wrong < 0.15:
            text = text.replace("]", "", 1)
        parts.append(text)
    ids = words.ids(f'{chance.choice(("", "", "", "x", " "))}{{"objects": [{", ".join(parts)}]}}')
    return ids if chance.random() < 0.7 else ids[: chance.randint(1, len(ids))]
