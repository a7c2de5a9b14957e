"""VinePPO, naively: where responses are cut, what states are worth, advantages of tokens; also with search trees.

Sources: arXiv 2410.01679, the specification (vineppo). A response is a dict as in ``gradients``, with ``return``; its
owner is its place among those of all ranks. A continuation is (sample, length of the prefix, ids, return).
"""

import math


def cuts(words, response, rules):
    """0, the first id of each further step, the number of ids."""
    ids, length = response["target"], len(response["target"])
    if rules["steps"] == "tokens":
        starts = range(rules["step_tokens"], length, rules["step_tokens"])
    elif rules["steps"] == "low_probability":
        unsure = [i for i, p in enumerate(response["engine"]) if p < math.log(rules["step_probability"])]
        starts = unsure[rules["step_every"] - 1 :: rules["step_every"]]
    else:
        starts = _lines("".join(words.text([i]) if i not in words.stops else "" for i in ids), rules["answer_mark"])
    bounds = [0, *sorted({s for s in starts if 0 < s < length}), length]
    most, num = rules["max_steps"], len(bounds) - 1
    return bounds if most is None or num <= most else [bounds[i * num // most] for i in range(most + 1)]


def _lines(text, mark):
    """Places of line feeds that begin a line with text, but for the first."""
    starts, place = [], 0
    while place < len(text):
        end = place
        while end < len(text) and text[end].isspace():
            end += 1
        if end > place and "\n" in text[place:end] and end < len(text) and place > 0:
            starts.append(text.index("\n", place))
        place = max(end, place) + (end == place)
    if mark and starts and text[starts[-1] :].lstrip().startswith(mark):
        starts.pop()
    return starts


def values(responses, bounds, fresh, rules, *, is_search):
    """[response][step] the mean return of what continued from the state before the step, its own response left out.

    ``fresh``: the continuations that were sampled, by (sample, prefix); with a search also all that passed further on.
    """
    through = {}
    for owner, (one, cut) in enumerate(zip(responses, bounds, strict=True)):
        for start in cut[:-1]:
            through.setdefault((one["index"], tuple(one["target"][:start])), []).append((owner, one["return"]))
    made = []
    for owner, (one, cut) in enumerate(zip(responses, bounds, strict=True)):
        row = []
        for start in cut[:-1]:
            state = (one["index"], tuple(one["target"][:start]))
            counts = is_search or rules["siblings"] == "all" or (rules["siblings"] == "prompt" and start == 0)
            siblings = [value for other, value in through[state] if other != owner] if counts else []
            returns = fresh.get(state, []) + siblings
            assert not is_search or len(returns) >= rules["search.num_least"], f"{len(returns)} returns of a state"
            row.append(sum(returns) / len(returns) if returns else None)
        made.append(row)
    return made


def needed(responses, bounds, rules):
    """State -> how many continuations must be sampled for it."""
    passing = {}
    for one, cut in zip(responses, bounds, strict=True):
        for start in cut[:-1]:
            state = (one["index"], tuple(one["target"][:start]))
            passing[state] = passing.get(state, 0) + 1
    made = {}
    for state, num in passing.items():
        counts = rules["siblings"] == "all" or (rules["siblings"] == "prompt" and not state[1])
        made[state] = max(0, rules["num_continuations"] - (num - 1 if counts else 0))
    return made


def advantages(responses, bounds, found, how):
    """[response][step] what each step changed; [response][token] that, normalised over all tokens."""
    rows, changes = [], []
    for one, cut, row in zip(responses, bounds, found, strict=True):
        steps = [(row[i + 1] if i + 1 < len(row) else one["return"]) - row[i] for i in range(len(row))]
        rows.append([a for i, a in enumerate(steps) for _ in range(cut[i], cut[i + 1])])
        changes.append(steps)
    flat = [a for row in rows for a in row]
    mean = sum(flat) / len(flat) if how == "whiten" else 0.0
    free = max(1, len(flat) - (how == "whiten"))
    scale = math.sqrt(sum((a - mean) ** 2 for a in flat) / free) if how != "none" else 1.0
    return changes, [[(a - mean) / scale if scale > 1e-8 else 0.0 for a in row] for row in rows]
