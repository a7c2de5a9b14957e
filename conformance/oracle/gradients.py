"""One optimizer step, naively: advantages, the clipped loss of each token, gradients, the change of the weights.

Sources: PPO (arXiv 1707.06347), GRPO (2402.03300), Dr. GRPO (2503.20783), RLOO (2402.14740), GSPO (2507.18071), CISPO
(2506.13585), tokens of high entropy (2506.01939), and the specification (grpo-server-mode). A completion is a dict:
prompt, target, advantages, old, sampled, reference, masked, written.
"""

import math
import re

import torch

from conformance.oracle.sampling import TooClose
from conformance.oracle.teachers import divergence


def group_advantages(groups, *, baseline, scale, everyone=None):
    """Of groups of rewards (None: not judged), as lists; ``everyone``: all rewards of the step, for ``batch``."""
    everyone = [r for group in groups for r in group if r is not None] if everyone is None else everyone
    made = []
    for group in groups:
        known = [r for r in group if r is not None]
        row = []
        for reward in group:
            others = list(known)
            if baseline == "leave_one_out" and reward is not None:
                others.remove(reward)
            if reward is None or len(known) < 2 or len(set(known)) == 1:
                row.append(0.0)
                continue
            divisor = {"none": 1.0, "group": deviation(known) + 1e-4, "batch": deviation(everyone) + 1e-4}[scale]
            row.append((reward - sum(others) / len(others)) / divisor)
        made.append(row)
    return made


def deviation(values):
    """Sample standard deviation; 0 of a single one."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def policy_step(batches, rows_of, rules, *, limit, distill=None):
    """The loss, with its graph, and the figures of a step over all completions of its micro-batches.

    ``rows_of(completion)``: [T, V] log-probabilities at its target by the policy as it is now. ``distill``: keys of
    that section; then completions have ``teacher``, as ``rows_of``, and ``weight``. Errors: ``TooClose`` (a policy so
    sure that float32 has few digits of 1 - p, which gradients are made of).
    """
    completions = [c for batch in batches for c in batch]
    written = [sum(c["written"] or [True] * len(c["target"])) for c in completions]
    counted = {"token": sum(written), "sequence": len(completions), "constant": len(completions) * limit}
    num = sum(n for n, c in zip(written, completions, strict=True) if not c["masked"])
    total, seen, unsure = torch.zeros((), dtype=torch.float64), [], False
    for batch in batches:
        tokens = [t for c in batch if not c["masked"] for t in scored_tokens(c, rows_of(c), rules, distill)]
        least = least_entropy(tokens, rules["top_entropy_share"])
        chosen = []
        for token in tokens:
            loss = rules["beta"] * token["kl"] + token["apart"]
            if least is None or float(token["entropy"].detach()) >= least:
                chosen.append(token)
                loss = loss - token["gain"] * token["correction"]
            if rules["normalize"] == "sequence":
                loss = loss / token["length"]
            total = total + loss / counted[rules["normalize"]]
        if chosen and rules["entropy_coef"]:
            mean = sum(token["entropy"] for token in chosen) / len(chosen)
            total = total - rules["entropy_coef"] * mean * len(tokens) / num
        seen += [token["seen"] for token in tokens]
        unsure |= any(token["unsure"] for token in tokens)
        if any(float(-t["logprob"].detach()) < 0.01 and t["seen"]["ratio_mean"] > 100 for t in tokens):
            raise TooClose
    figures = {
        name: sum(float(torch.as_tensor(one[name]).detach()) for one in seen) / num for name in (seen or [{}])[0]
    }
    if figures.get("entropy", 1.0) < 0.01:
        raise TooClose
    return total, {name: value for name, value in figures.items() if not (unsure and name == "clip_share")}


def least_entropy(tokens, share):
    """That of the tokens which still count; None: all do. Errors: ``TooClose`` (tokens that float32 may part)."""
    if share == 1 or not tokens:
        return None
    entropies = sorted(float(token["entropy"].detach()) for token in tokens)
    place = (1 - share) * (len(entropies) - 1)
    low = math.floor(place)
    high = min(low + 1, len(entropies) - 1)
    least = entropies[low] + (place - low) * (entropies[high] - entropies[low])
    if sum(abs(entropy - least) < 1e-5 for entropy in entropies) > (place == low):
        raise TooClose
    return least


def scored_tokens(completion, rows, rules, distill):
    """What each token that is learnt from adds."""
    mask = completion["written"] or [True] * len(completion["target"])
    places = [place for place, is_mine in enumerate(mask) if is_mine]
    now = {place: rows[place][completion["target"][place]] for place in places}
    old = {p: now[p].detach() if completion["old"] is None else torch.tensor(completion["old"][p]) for p in places}
    drift = {p: torch.zeros(()) if completion["sampled"] is None else old[p] - completion["sampled"][p] for p in places}
    weights, cispo, made = corrections(drift, rules), rules["clip"] == "cispo", []
    low, high = 1 - rules["epsilon"], 1 + (rules["epsilon"] if rules["epsilon_high"] is None else rules["epsilon_high"])
    for place in places:
        p, advantage, taught, apart = now[place], completion["advantages"][place], 0.0, 0.0
        if distill is not None:
            weight, theirs = completion["weight"], completion["teacher"][place]
            taught = p.detach() - theirs[completion["target"][place]]
            if distill["loss"] == "sampled":
                advantage = advantage + weight * float(theirs[completion["target"][place]] - old[place])
            else:
                apart = divergence(rows[place], theirs, beta=distill["beta"], top_k=distill["top_k"])
        ratio = torch.exp(p - old[place])
        if rules["importance"] == "sequence":
            ratio = torch.exp(sum(now[q] - old[q] for q in places) / len(places))
        held = torch.clamp(ratio, max=rules["ratio_cap"]) if rules["ratio_cap"] is not None else ratio
        gain = torch.minimum(held * advantage, torch.clamp(ratio, low, high) * advantage)
        if cispo:
            gain = torch.clamp(ratio.detach(), max=high) * advantage * p
        far = 0.0 if completion["reference"] is None else completion["reference"][place] - p
        kl = torch.exp(torch.as_tensor(far)) - far - 1
        r = float(ratio.detach())
        is_clipped = (r < low and advantage < 0) or (r > high and advantage > 0)
        likely = rows[place][torch.isfinite(rows[place])]
        entropy = -(torch.exp(likely) * likely).sum()
        seen = {"kl": kl, "clip_share": r > high if cispo else is_clipped, "ratio_mean": r}
        seen |= {"drift": abs(float(drift[place])), "correction_mean": weights[place]}
        seen |= {"entropy": entropy if rules["entropy_coef"] or rules["top_entropy_share"] < 1 else -p}
        seen |= {"teacher_kl": taught, "divergence": apart} if distill is not None else {}
        seen |= {"teacher_logprob": p.detach() - taught, "policy_logprob": p.detach()} if distill is not None else {}
        token = {"gain": gain, "correction": weights[place], "kl": kl, "entropy": entropy, "length": len(places)}
        token |= {"logprob": p, "apart": completion["weight"] * apart if distill is not None else 0.0, "seen": seen}
        unsure = (abs(advantage) < 1e-9 and not cispo) or min(abs(r - low), abs(r - high)) < 1e-4
        made.append(token | {"unsure": unsure})
    return made


def corrections(drift, rules):
    """{place: weight} for the difference between learner and engine of one completion's tokens."""
    own = {name.removeprefix("correction."): value for name, value in rules.items() if name.startswith("correction.")}
    if not own and rules["correction_cap"] is None:
        return dict.fromkeys(drift, 1.0)
    own = {"level": "token", "mode": "truncate", "low": None, "high": rules["correction_cap"]} | own
    whole, made = sum(float(value) for value in drift.values()), {}
    for place, value in drift.items():
        logs = {"token": float(value), "sequence": whole, "geometric": whole / len(drift)}
        ratio, low = math.exp(logs[own["level"]]), own["low"] or 0.0
        if own["mode"] == "truncate":
            made[place] = min(max(ratio, low), own["high"])
        else:
            inside = 1.0 if own["level"] == "geometric" else ratio
            made[place] = inside if low <= ratio <= own["high"] else 0.0
    return made


NOT_DECAYED = ("bias", r"norm\d", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Names of weights that transformers' Trainer does not decay."""


class Optimizer:
    """``optim`` sgd or adamw_torch, with clipping and a schedule, a weight at a time."""

    def __init__(self, training: dict, num_steps: int) -> None:
        self.rules, self.num_steps, self.moments = training, num_steps, {}

    def rate(self, step: int) -> float:
        """The learning rate of an optimizer step, from 0."""
        rules, kind = self.rules, self.rules["lr_scheduler_type"]
        warm = rules["warmup_steps"]
        warm = math.ceil(self.num_steps * warm) if warm < 1 else int(warm)
        if kind != "constant" and step < warm:
            return rules["learning_rate"] * step / max(1, warm)
        left = (self.num_steps - step) / max(1, self.num_steps - warm)
        share = {"constant": 1.0, "constant_with_warmup": 1.0, "linear": left}
        share["cosine"] = 0.5 * (1 + math.cos(math.pi * (1 - left)))
        return rules["learning_rate"] * max(0.0, share[kind])

    def step(self, weights: dict, gradients: dict, step: int) -> float:
        """Change the weights in place; returns the norm of the gradients before they are clipped."""
        rules, rate = self.rules, self.rate(step)
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
        limit = rules["max_grad_norm"]
        shrink = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        for name, gradient in gradients.items():
            weight, gradient = weights[name], gradient.double() * shrink
            is_decayed = not any(re.search(pattern, name.lower()) for pattern in NOT_DECAYED)
            decay = rules["weight_decay"] if is_decayed else 0.0
            if rules["optim"] == "sgd":
                weight.data -= rate * (gradient + decay * weight.data)
                continue
            b1, b2 = rules["adam_beta1"], rules["adam_beta2"]
            first, second, n = self.moments.get(name, (0.0, 0.0, 0))
            first, second, n = b1 * first + (1 - b1) * gradient, b2 * second + (1 - b2) * gradient**2, n + 1
            self.moments[name] = (first, second, n)
            weight.data *= 1 - rate * decay
            change = (first / (1 - b1**n)) / (torch.sqrt(second / (1 - b2**n)) + rules["adam_epsilon"])
            weight.data -= rate * change
        return norm
