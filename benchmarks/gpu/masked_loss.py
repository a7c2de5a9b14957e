"""The masked loss inside a frozen head beside whole logits, by supervised share: time and memory of both passes."""

import random

import torch
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks.gpu.measure import device, judge, say, take_turns
from rollmatch.learn.head import HeadStates
from rollmatch.objectives.rollout_matching.loss import LossRules, count_totals, logit_indices, masked_loss_of_kept
from rollmatch.objectives.rollout_matching.supervision import IGNORED
from rollmatch.records import Supervision

SHAPE = {"num_tokens": 12_000, "num_ids": 151_936, "hidden_len": 4096, "dtype": torch.bfloat16}
TINY = {"num_tokens": 64, "num_ids": 1500, "hidden_len": 32, "dtype": torch.float32}
SHAPES = {"full": SHAPE, "tiny": TINY}
SHARES = (0.2, 0.05, 1.0)
JUDGED = 0.2
FASTER_BAR, PEAK_BAR, PROPORTION_BAR = 5.0, 0.5e9, 1.15
COORD_SHARE = 0.25
"""Of the supervised tokens in the mixed case."""


def supervise(num_tokens, share, *, first_coord, coord_share=0.0):
    """A share of the tokens but the first, as a tail; of them a share coordinates."""
    chooser = random.Random(0)
    positions = list(range(num_tokens - max(1, round(share * (num_tokens - 1))), num_tokens))
    coords = sorted(chooser.sample(positions, round(coord_share * len(positions))))
    text = set(positions) - set(coords)
    labels = tuple(chooser.randrange(first_coord) if place in text else IGNORED for place in range(num_tokens))
    return Supervision(
        labels=labels,
        weights=tuple(float(label != IGNORED) for label in labels),
        coord_positions=tuple(coords),
        coord_bins=tuple(chooser.randrange(1000) for _ in coords),
    )


def forms(head, hidden, share):
    """Name -> a call that makes the loss and the gradient of the hidden states, and returns the loss."""
    num_ids = head.weight.shape[0]
    rules = LossRules(coord_ids=tuple(range(num_ids - 1000, num_ids)))
    text, mixed = (
        supervise(len(hidden), share, first_coord=num_ids - 1000, coord_share=part) for part in (0.0, COORD_SHARE)
    )
    labels = torch.tensor(text.labels, device=hidden.device)
    kept, kept_labels = (labels != IGNORED).nonzero()[:, 0] - 1, labels[labels != IGNORED]

    def of_model(supervision):
        """As the trainer does: the model keeps the hidden states that are asked for."""
        kept = torch.tensor(logit_indices(supervision), device=hidden.device)
        totals = count_totals([supervision])

        def call():
            states = HeadStates.of(hidden[kept], head)
            return masked_loss_of_kept(states, supervision=supervision, rules=rules, totals=totals).total

        return call

    def whole_logits():
        return ForCausalLMLoss(head(hidden)[None], labels[None], num_ids)

    def kept_logits():
        return functional.cross_entropy(head(hidden[kept]).float(), kept_labels)

    calls = {"ours": of_model(text), "ours_with_coordinates": of_model(mixed)}
    calls |= {"whole_logits_of_transformers": whole_logits, "kept_logits": kept_logits}
    liger = liger_form(head, hidden, labels)
    return calls | ({"liger": liger} if liger else {})


def liger_form(head, hidden, labels):
    """Liger's fused linear cross-entropy over all rows, where it is installed."""
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    fused = LigerFusedLinearCrossEntropyLoss()
    shifted = functional.pad(labels[1:], (0, 1), value=IGNORED)
    return lambda: fused(head.weight, hidden, shifted)


def with_backward(hidden, call):
    def run():
        loss = call()
        loss.backward()
        hidden.grad = None  # so that it counts as part of the call that made it
        return loss.detach()

    return run


def floor_of(head, hidden, share):
    """The two matrix products alone that a frozen head costs."""
    rows = hidden.detach()[: max(1, round(share * (len(hidden) - 1)))]
    chunks = rows.split(2048)

    def run():
        for chunk in chunks:
            (chunk @ head.weight.T) @ head.weight

    return run


def measure(shape, *, rounds, limit_s):
    torch.manual_seed(0)
    place = {"device": device(), "dtype": shape["dtype"]}
    head = torch.nn.Linear(shape["hidden_len"], shape["num_ids"], bias=False, **place).requires_grad_(False)
    hidden = torch.randn(shape["num_tokens"], shape["hidden_len"], **place, requires_grad=True)
    figures = {}
    for share in SHARES:
        say(f"masked loss, f = {share}")
        calls = {name: with_backward(hidden, call) for name, call in forms(head, hidden, share).items()}
        losses = {name: float(call()) for name, call in calls.items()}
        measured = take_turns({"floor": floor_of(head, hidden, share)} | calls, rounds=rounds, limit_s=limit_s)
        figures[str(share)] = {"losses": losses, "measured": measured}
    del head, hidden, calls
    return {"shape": {**shape, "dtype": str(shape["dtype"])}, "shares": figures, "bars": bars_of(figures)}


def bars_of(figures):
    def median(share, name):
        return figures[str(share)]["measured"][name]["median_s"]

    bars = {}
    judged = figures[str(JUDGED)]
    faster = median(JUDGED, "whole_logits_of_transformers") / median(JUDGED, "ours")
    judge(bars, "masked loss, times as fast as whole logits, f = 0.2", faster, at_least=FASTER_BAR)
    if "liger" in judged["measured"]:
        say(f"  times as fast as Liger, f = 0.2: {median(JUDGED, 'liger') / median(JUDGED, 'ours'):.2f}")
    for name in ("ours", "ours_with_coordinates"):
        peak = judged["measured"][name]["peak_bytes"]
        judge(bars, f"masked loss, peak extra bytes of {name}, f = 0.2", peak, at_most=PEAK_BAR)
    share_of_all = median(JUDGED, "ours") / (JUDGED * median(1.0, "ours"))
    judge(bars, "masked loss, time at f = 0.2 over 0.2 of the time at f = 1", share_of_all, at_most=PROPORTION_BAR)
    plain = judged["losses"]["whole_logits_of_transformers"]
    judge(bars, "masked loss, relative difference of losses", abs(judged["losses"]["ours"] / plain - 1), at_most=1e-3)
    return bars
