"""Rollouts of ``rollout_backend: hf``, naively: one token after the other, without cache and padding, in float32.

A batch of prompts shares the random numbers of its first request's seed, and a row that has ended still uses them.
"""

import torch

MARGIN = 3e-5
"""Relative; of what decides about a token."""


class TooClose(Exception):
    """Rounding may decide what is sampled or learnt: nothing can be said about the rest of this run."""


@torch.no_grad()
def sample(policy, completions, seed, decoding, *, stops, banned, limit):
    """[(target ids with the stop token, log-probabilities)] for prompts that are generated together."""
    rows, logprobs = [[] for _ in completions], [[] for _ in completions]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        while any(stops.isdisjoint(row) and len(row) < limit for row in rows):
            scores = []
            for one, row in zip(completions, rows, strict=True):
                context = [*one["expanded"], *row]
                logits = policy.logits(context, one["images"])[-1].float()
                scores.append(_shaped(logits, context, decoding, banned))
            chosen = _choose(torch.stack(scores), decoding, [not stops.isdisjoint(row) for row in rows])
            for row, own, score, token in zip(rows, logprobs, scores, chosen, strict=True):
                if stops.isdisjoint(row):
                    own.append(float(torch.log_softmax(score, 0)[token]))
                    row.append(token)
    return list(zip(rows, logprobs, strict=True))


def _shaped(logits, context, decoding, banned):
    """Penalty, ban, temperature, top-k, top-p: in this order."""
    logits = logits.clone()
    if (penalty := decoding["repetition_penalty"]) != 1:
        for token in set(context):
            logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    for token in banned:
        logits[token] = -torch.inf
    if not decoding["temperature"]:
        return logits
    logits = logits / decoding["temperature"]
    if decoding["top_k"] > 0:
        ranked = logits.sort(descending=True).values
        least = ranked[decoding["top_k"] - 1]
        if least - ranked[decoding["top_k"]] < MARGIN:
            raise TooClose
        logits[logits < least] = -torch.inf
    if decoding["top_p"] < 1:
        shares, order = logits.softmax(0).sort(descending=True)
        before = shares.cumsum(0) - shares
        if (before - decoding["top_p"]).abs().min() < MARGIN / 10:
            raise TooClose
        logits[order[before >= decoding["top_p"]]] = -torch.inf
    return logits


def _choose(scores, decoding, done):
    if decoding["temperature"]:
        shares, state = scores.softmax(-1), torch.get_rng_state()
        best = (shares / torch.empty_like(shares).exponential_(1)).topk(2, dim=-1).values  # what multinomial compares
        torch.set_rng_state(state)
        margins, chosen = best[:, 0] / best[:, 1] - 1, torch.multinomial(shares, 1).squeeze(1)
    else:
        best = scores.topk(2, dim=-1)
        margins, chosen = best.values[:, 0] - best.values[:, 1], best.indices[:, 0]
    if any(margin < MARGIN and not over for margin, over in zip(margins.tolist(), done, strict=True)):
        raise TooClose
    return chosen.tolist()
