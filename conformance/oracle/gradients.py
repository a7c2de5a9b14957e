"""One optimizer step, naively: advantages, the clipped loss of each token, gradients, the change of the weights.

Sources: PPO (arXiv 1707.06347), GRPO (2402.03300), Dr. GRPO (2503.20783), RLOO (2402.14740), and the specification
(grpo-server-mode). A completion is a dict: prompt, target, advantages, old, sampled, reference, masked, written.
"""

import math
import re

import torch

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


def policy_step(completions, rows_of, rules, *, limit, distill=None):
    """The loss, with its graph, and the figures of a step over all its completions.

    ``rows_of(completion)``: [T, V] log-probabilities at its target by the policy as it is now. ``distill``: keys of
    that section; then completions have ``teacher``, as ``rows_of``, and ``weight``.
    """
    low, high = 1 - rules["epsilon"], 1 + (rules["epsilon"] if rules["epsilon_high"] is None else rules["epsilon_high"])
    written = [c["written"] or [True] * len(c["target"]) for c in completions]
    counted = {"token": sum(map(sum, written)), "sequence": len(completions)}
    counted["constant"] = len(completions) * limit
    total, figures, num, unsure = torch.zeros((), dtype=torch.float64), {}, 0, False
    for completion, mask in zip(completions, written, strict=True):
        if completion["masked"]:
            continue
        rows = rows_of(completion)
        now = [row[token] for row, token in zip(rows, completion["target"], strict=True)]
        for place, is_mine in enumerate(mask):
            if not is_mine:
                continue
            p, advantage = now[place], completion["advantages"][place]
            old = p.detach() if completion["old"] is None else completion["old"][place]
            taught, apart = 0.0, 0.0
            if distill is not None:
                weight, theirs = completion["weight"], completion["teacher"][place]
                taught = p.detach() - theirs[completion["target"][place]]
                if distill["loss"] == "sampled":
                    advantage = advantage + weight * float(theirs[completion["target"][place]] - old)
                else:
                    apart = divergence(rows[place], theirs, beta=distill["beta"], top_k=distill["top_k"])
            ratio = torch.exp(p - old)
            held = torch.clamp(ratio, max=rules["ratio_cap"]) if rules["ratio_cap"] is not None else ratio
            gain = torch.minimum(held * advantage, torch.clamp(ratio, low, high) * advantage)
            drift = (
                torch.zeros(())
                if completion["sampled"] is None
                else torch.as_tensor(old - completion["sampled"][place])
            )
            cap = rules["correction_cap"]
            correction = min(math.exp(drift), cap) if cap is not None else 1.0
            far = 0.0 if completion["reference"] is None else completion["reference"][place] - p
            kl = torch.exp(torch.as_tensor(far)) - far - 1
            loss = -gain * correction + rules["beta"] * kl
            loss = loss + (completion["weight"] * apart if distill is not None else 0.0)
            if rules["normalize"] == "sequence":
                loss = loss / sum(mask)
            total = total + loss / counted[rules["normalize"]]
            r = float(ratio.detach())
            unsure |= abs(advantage) < 1e-9 or min(abs(r - low), abs(r - high)) < 1e-4
            is_clipped = (r < low and advantage < 0) or (r > high and advantage > 0)
            seen = {"kl": kl, "clip_share": is_clipped, "ratio_mean": r, "drift": abs(float(drift))}
            seen |= {"correction_mean": correction, "entropy": -p}
            seen |= {"teacher_kl": taught, "divergence": apart} if distill is not None else {}
            num += 1
            figures = {
                name: figures.get(name, 0.0) + float(torch.as_tensor(value).detach()) for name, value in seen.items()
            }
    figures = {name: value / num for name, value in figures.items() if not (unsure and name == "clip_share")}
    return total, figures


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
