"""Rollout matching, naively: parse, match, append, labels and losses of one response in the form of ``coord_tokens``.

For tokenizers with one token a byte, so that a place in the text is a place in the ids; boxes only. Sources: the
specification (parsing, matching, target, supervision).
"""

import json
import re
from collections import Counter
from itertools import product

import numpy as np
import torch
from pycocotools import mask

FIRST = 0xE000
"""Where coordinate tokens stand while a response is read as text: one character each, which no JSON means by itself."""
KEYS = {"desc", "bbox_2d"}


def parse(words, response):
    """A dict: kept (number of ids), head (what the tail begins with), elements, objects, truncated, invalid, drops.

    An object is desc, bins, places (ids of its coordinates), desc_at (ids of its description).
    """
    coords = {words.added[f"<|coord_{k}|>"]: k for k in range(1000)}
    ids = response[: next((i for i, t in enumerate(response) if t in words.added.values() and t not in coords), None)]
    raw = [chr(FIRST + coords[t]).encode() if t in coords else words.bytes_of.get(t, b"\xff") for t in ids]
    text, owner = _text(raw)
    opening = re.match(r'\s*\{\s*"objects"\s*:\s*\[', text)
    begun = '{"objects":['.startswith("".join(text.split()))
    empty = {"kept": 0, "head": '{"objects": [', "elements": 0, "objects": [], "drops": []}
    if not opening:
        return empty | {"truncated": begun, "invalid": True}
    made = empty | {"head": "", "invalid": False, "truncated": False, "objects": [], "drops": []}
    place = cut = opening.end()
    first = True
    while True:
        place = re.compile(r"\s*").match(text, place).end()
        if first and text.startswith("]", place):
            break
        try:
            value, end = json.JSONDecoder(object_pairs_hook=list).raw_decode(text, place)
        except json.JSONDecodeError as error:
            is_end = _ran_out(text, error.pos)
            made["truncated"] |= is_end
            made["drops"] += [] if is_end else ["malformed"]
            made["kept"] = owner[cut] if cut < len(owner) else len(ids)
            return made
        if isinstance(value, int) and text[end : end + 1] not in tuple(", ]\n\t"):
            made["truncated"] = end == len(text)
            made["drops"] += [] if made["truncated"] else ["malformed"]
            break
        made["elements"], cut, first = made["elements"] + 1, end, False
        verdict = _judge(value, text[place:end])
        if isinstance(verdict, str):
            made["drops"].append(verdict)
        else:
            at = [owner[place + i] for i, c in enumerate(text[place:end]) if ord(c) >= FIRST]
            named = re.search(r'"desc"\s*:\s*"((?:[^"\\]|\\.)*)"', text[place:end])
            span = (owner[place + named.start(1)], owner[place + named.end(1)])
            made["objects"].append(verdict | {"places": at, "desc_at": span})
        after = re.compile(r"\s*").match(text, end).end()
        if not text.startswith(",", after):
            place = after
            break
        place = after + 1
    made["kept"] = owner[cut] if cut < len(owner) else len(ids)
    closing = re.compile(r"\s*\]\s*\}\s*").match(text, place)
    if not closing:
        partial = re.compile(r"\s*(\]\s*)?").match(text, place).end() == len(text)
        made["truncated"] |= partial
        bad = "malformed" if text[place : place + 1] != "]" else "trailing_text"
        made["drops"] += [] if partial or "malformed" in made["drops"] else [bad]
    elif closing.end() < len(text):
        made["drops"].append("trailing_text")
    return made


def _text(raw):
    """The text up to bytes that are none, and the id of each character."""
    text, owner, place = "", [], 0
    while place < len(raw):
        for size in range(1, 5):
            try:
                character = b"".join(raw[place : place + size]).decode()
            except UnicodeDecodeError:
                continue
            break
        else:
            is_cut = len(raw) - place < 4 and raw[place][0] >= 0xC2
            return text + ("\ufffd" if is_cut else "\0"), [*owner, place]
        text, owner, place = text + character, owner + [place] * len(character), place + size
    return text, owner


def _ran_out(text, place):
    """Whether what is wrong at ``place`` is only that the text ends."""
    return bool(re.fullmatch(r'\s*(?:"(?:[^"\\]|\\.)*\\?)?', text[place:], re.DOTALL))


def _judge(pairs, text):
    """An object, or the reason for which it is none."""
    if not (isinstance(pairs, list) and text[0] == "{"):
        return "not_an_object"
    names = [name for name, _ in pairs]
    fields = dict(pairs)
    if len(names) > len(fields):
        return "duplicate_key"
    if set(names) - KEYS - {"poly"}:
        return "unexpected_keys"
    desc = fields.get("desc")
    if not isinstance(desc, str) or not desc.strip():
        return "missing_desc"
    box = fields.get("bbox_2d")
    if any(ord(c) >= FIRST for c in desc):
        return "coord_token_in_desc"
    if box is None:
        return "missing_geometry"
    if len(box) != 4:
        return "wrong_arity"
    if not all(isinstance(one, str) and len(one) == 1 and ord(one) >= FIRST for one in box):
        return "non_coord_token"
    bins = [ord(one) - FIRST for one in box]
    return "bbox_degenerate" if bins[0] >= bins[2] or bins[1] >= bins[3] else {"desc": desc, "bins": bins}


def match(predicted, truth, rules):
    """[partner of each prediction, or None]: the first in lexical order of the cheapest assignments; and the IoUs."""
    size = rules["maskiou_resolution"]
    drawn = [[_mask(box, size) for box in boxes] for boxes in (predicted, truth)]
    allowed, ious = [], {}
    for p, box in enumerate(predicted):
        overlaps = [_overlap(box, other) for other in truth]
        centres = [sum((box[i] + box[i + 2] - o[i] - o[i + 2]) ** 2 for i in (0, 1)) for o in truth]
        keys = [-o for o in overlaps] if any(overlaps) else centres
        nearest = sorted(range(len(truth)), key=lambda g: (keys[g], g))[: rules["candidate_top_k"]]
        for g in nearest:
            mine, other = drawn[0][p], drawn[1][g]
            thin = not mine.any() or not other.any()
            ious[p, g] = overlaps[g] if thin else (mine & other).sum() / (mine | other).sum()
        allowed.append([g for g in sorted(nearest) if ious[p, g] >= rules["maskiou_gate"]])
    best, least = [], np.inf
    for choice in product(*([*row, len(truth)] for row in allowed)):
        found = [g for g in choice if g < len(truth)]
        if len(set(found)) < len(found):
            continue
        cost = sum(rules["fp_cost"] if g == len(truth) else 1 - ious[p, g] for p, g in enumerate(choice))
        cost += rules["fn_cost"] * (len(truth) - len(found))
        if cost < least - 1e-9:
            best, least = choice, cost
    return [None if g == len(truth) else g for g in best], ious


def _overlap(one, other):
    sides = [max(0, min(one[i + 2], other[i + 2]) - max(one[i], other[i])) for i in (0, 1)]
    shared = sides[0] * sides[1]
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (one, other)]
    return shared / (sum(areas) - shared) if sum(areas) - shared else 0.0


def _mask(box, size):
    left, top, right, bottom = (k * (size - 1) / 999 for k in box)
    outline = [[left, top, right, top, right, bottom, left, bottom]]
    return mask.decode(mask.frPyObjects(outline, size, size))[:, :, 0].astype(bool)


def target_of(words, response, truth, rules):
    """A dict of the target's ids, its text labels (place -> (id, weight)), its slots (place -> bin), and figures."""
    parsed = parse(words, response)
    boxes = [one["bins"] for one in parsed["objects"]]
    partners, ious = match(boxes, [one["bbox_2d"] for one in truth], rules) if boxes else ([], {})
    ids, labels, slots = list(response[: parsed["kept"]]), {}, {}
    for found, partner in zip(parsed["objects"], partners, strict=True):
        if partner is None:
            continue
        slots |= dict(zip(found["places"], truth[partner]["bbox_2d"], strict=True))
        if weight := rules["desc_ce_weight_matched"]:
            start, end = found["desc_at"]
            wanted = words.ids(json.dumps(truth[partner]["desc"], ensure_ascii=False)[1:])
            for place, token in zip(range(start, end + 1), wanted, strict=False):
                labels[place] = (token, weight)
                if response[place] != token:
                    break
    missed = [one for g, one in enumerate(truth) if g not in partners]
    text, spans = parsed["head"], []
    for number, one in enumerate(missed):
        text += ", " if number or parsed["elements"] else ""
        box = ", ".join(f'"<|coord_{k}|>"' for k in one["bbox_2d"])
        name = json.dumps(one["desc"], ensure_ascii=False)
        before = len(words.ids(text + '{"desc": "'))
        text += f'{{"desc": {name}, "bbox_2d": [{box}]}}'
        spans.append((before, before + len(words.ids(name[1:-1]))))
    tail = [*words.ids(text + "]}"), words.stop]
    coords = {words.added[f"<|coord_{k}|>"]: k for k in range(1000)}
    for place, token in enumerate(tail):
        at = len(ids) + place
        if token in coords:
            slots[at] = coords[token]
        elif not any(start <= place < end for start, end in spans) or rules["desc_ce_weight"]:
            is_desc = any(start <= place < end for start, end in spans)
            labels[at] = (token, rules["desc_ce_weight"] if is_desc else 1.0)
    pairs = [(p, g) for p, g in enumerate(partners) if g is not None]
    right = sum(parsed["objects"][p]["desc"] == truth[g]["desc"] for p, g in pairs)
    counts = {"predicted": len(boxes), "truth": len(truth), "matched": len(pairs), "right": right}
    counts |= {"iou": sum(ious[pair] for pair in pairs), "appended": len(missed)}
    counts |= {"invalid": parsed["invalid"], "truncated": parsed["truncated"], "malformed": len(parsed["drops"])}
    counts |= {f"drop/{reason}": parsed["drops"].count(reason) for reason in parsed["drops"]}
    return {"target": ids + tail, "labels": labels, "slots": slots, "counts": counts}


def matching_step(segments, logits_of, rules, coord_ids):
    """The loss with its graph, and figures; ``logits_of(segment)``: [T, V] that predict its target's tokens."""
    weight = sum(w for one in segments for _, w in one["labels"].values()) or 1.0
    num_slots = sum(len(one["slots"]) for one in segments) or 1
    text = coord = torch.zeros((), dtype=torch.float64)
    for one in segments:
        logits = logits_of(one)
        for place, (token, share) in one["labels"].items():
            text = text - share * (logits[place][token] - torch.logsumexp(logits[place], 0)) / weight
        for place, true in one["slots"].items():
            scaled = logits[place] / rules["temperature_coord"]
            p = torch.log_softmax(scaled[coord_ids], 0)
            far = torch.arange(1000, dtype=torch.float64) - true
            q = torch.exp(-0.5 * (far / rules["target_sigma"]) ** 2)
            if rules["target_truncate"] is not None:
                q = torch.where(far.abs() > rules["target_truncate"], 0.0, q)
            q = q / q.sum()
            apart = (torch.cumsum(p.exp(), 0) - torch.cumsum(q, 0)).abs().sum() / 1000
            gate = torch.logsumexp(scaled, 0) - torch.logsumexp(scaled[coord_ids], 0)
            slot = rules["soft_ce_weight"] * -(q * p).sum() + rules["w1_weight"] * apart + rules["gate_weight"] * gate
            coord = coord + slot / num_slots
    return text + coord, {"loss_ce": float(text.detach()), "loss_coord": float(coord.detach())}


def quality(counts):
    """Precision, recall and their like: sums before ratios, 0/0 is 0."""
    total = Counter()
    for one in counts:
        total.update(one)

    def ratio(part, whole):
        return part / whole if whole else 0.0

    both = total["predicted"] + total["truth"]
    return {
        "precision": ratio(total["matched"], total["predicted"]),
        "recall": ratio(total["matched"], total["truth"]),
        "f1": ratio(2 * total["matched"], both),
        "f1_desc": ratio(2 * total["right"], both),
        "mean_iou": ratio(total["iou"], total["matched"]),
        "invalid_rate": ratio(total["invalid"], len(counts)),
        "truncated_rate": ratio(total["truncated"], len(counts)),
        "malformed_rate": ratio(total["malformed"], total["malformed"] + total["predicted"]),
        **{name: value for name, value in total.items() if name.startswith("drop/")},
    }
