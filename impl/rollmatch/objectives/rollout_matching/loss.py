"""The masked loss: hard cross-entropy on text, and on coordinates a Gaussian target with a distance.

Normalisation, said once: ::

    total = sum of weighted text CE / totals.text_weight  +  sum of slot losses / totals.num_slots

where the totals (``count_totals``) are counted over all rows of the optimizer step and all ranks, before any
forward pass. Every term is therefore additive: micro-batches and ranks sum to what one big batch would
give, in value and in gradient. Gradients are to be summed, not averaged: where a wrapper averages over
ranks or accumulation steps, the caller multiplies by their number.

One slot, with z the 1,000 coordinate logits over T = ``temperature_coord``, p = softmax(z), and q the
normalised Gaussian around the true bin: ::

    slot = soft_ce_weight * -sum q log p  +  w1_weight * sum |CDF_p - CDF_q| / 1000  +  gate_weight * gate
    gate = logsumexp(all logits / T) - logsumexp(z)

Logits are scored in float32 and only where something is supervised; the logit of position p stands at
index p - 1. A logit that is not finite makes a loss that is not finite, for the caller to see. Source: the
rollout-matching objective (soft cross-entropy, W1, gate).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import fsum

import torch
from torch import Tensor

from rollmatch.errors import LearnError
from rollmatch.learn.head import Logits, column_scores, logprobs_of, to_device, widened
from rollmatch.objectives.rollout_matching.supervision import IGNORED
from rollmatch.records import NUM_BINS, Supervision


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRules:
    """The objective's knobs; their ranges are the config's to hold."""

    coord_ids: tuple[int, ...]
    """[1000] token id of each bin; none where coordinates are numbers."""
    target_sigma: float = 2.0
    """In bins."""
    target_truncate: int | None = None
    """Bins farther than this from the true one get no mass; None: all get some."""
    temperature_coord: float = 1.0
    soft_ce_weight: float = 1.0
    w1_weight: float = 1.0
    gate_weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTotals:
    """What an optimizer step supervises, over all its rows and ranks."""

    text_weight: float
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """One row's share of the step's loss; all scalars, additive over rows. ``total`` has a graph."""

    total: Tensor
    ce: Tensor
    coord: Tensor

    @property
    def figures(self) -> dict[str, float]:
        """For the log."""
        ce, coord = torch.stack([self.ce, self.coord]).tolist()  # at once: each look waits for the device
        return {"loss_ce": ce, "loss_coord": coord}


def count_totals(supervisions: Iterable[Supervision]) -> LossTotals:
    """Count one rank's rows; over ranks, sum both fields.

    >>> row = Supervision(labels=(-100, 5, -100), weights=(0.0, 0.5, 0.0), coord_positions=(2,), coord_bins=(8,))
    >>> count_totals([row, row])
    LossTotals(text_weight=1.0, num_slots=2)
    """
    rows = list(supervisions)
    return LossTotals(
        text_weight=fsum(weight for row in rows for weight in row.weights),
        num_slots=sum(len(row.coord_positions) for row in rows),
    )


def logit_indices(supervision: Supervision) -> tuple[int, ...]:
    """Where the supervised logits stand, ascending: what to give a model as ``logits_to_keep``.

    >>> logit_indices(Supervision(labels=(-100, -100, 5, -100), weights=(0.0, 0.0, 1.0, 0.0), coord_positions=(3,),
    ...                           coord_bins=(8,)))
    (1, 2)
    """
    text = (position for position, label in enumerate(supervision.labels) if label != IGNORED)
    return tuple(sorted({position - 1 for position in (*text, *supervision.coord_positions)}))


def masked_loss(logits: Logits, *, supervision: Supervision, rules: LossRules, totals: LossTotals) -> LossTerms:
    """Score a row's logits [T, V] (a padded batch: [B * L, V]), or what stands for them.

    Errors: ``logits-misfit``, ``totals-too-small``.
    """
    _check_num_rows(len(logits), len(supervision.labels))
    targets = _targets_of(supervision, totals=totals, device=logits.device)
    return _score(logits, targets=targets, rules=rules, totals=totals)


def masked_loss_of_kept(logits: Logits, *, supervision: Supervision, rules: LossRules, totals: LossTotals) -> LossTerms:
    """Score logits [K, V] that a model computed at ``logit_indices(supervision)`` only. Errors: as ``masked_loss``."""
    kept = logit_indices(supervision)
    _check_num_rows(len(logits), len(kept))
    targets = _targets_of(supervision, totals=totals, device=logits.device)
    order = to_device(kept, dtype=torch.int64, device=logits.device)
    targets = replace(
        targets,
        text_rows=torch.searchsorted(order, targets.text_rows),
        slot_rows=torch.searchsorted(order, targets.slot_rows),
    )
    return _score(logits, targets=targets, rules=rules, totals=totals)


def gaussian_targets(bins: Tensor, *, rules: LossRules) -> Tensor:
    """[K] bins -> [K, 1000] target distributions.

    >>> rules = LossRules(coord_ids=tuple(range(1000)), target_sigma=1.0, target_truncate=1)
    >>> gaussian_targets(torch.tensor([0]), rules=rules)[0, :3].mul(100).round().tolist()
    [62.0, 38.0, 0.0]
    """
    distance = (torch.arange(NUM_BINS, device=bins.device) - bins[:, None]).float()
    exponent = -0.5 * (distance / rules.target_sigma) ** 2
    if rules.target_truncate is not None:
        exponent = exponent.masked_fill(distance.abs() > rules.target_truncate, -torch.inf)
    return exponent.softmax(-1)


def slot_losses(logits: Tensor, *, bins: Tensor, rules: LossRules) -> Tensor:
    """[K, V] float32 logits and [K] true bins -> [K] slot losses."""
    scaled = logits / rules.temperature_coord
    coord = scaled[:, to_device(rules.coord_ids, dtype=torch.int64, device=logits.device)]
    with torch.set_grad_enabled(torch.is_grad_enabled() and rules.gate_weight != 0):
        total = scaled.logsumexp(-1)
    return coord_losses(coord, total, bins=bins, rules=rules)


def coord_losses(coord: Tensor, total: Tensor, *, bins: Tensor, rules: LossRules) -> Tensor:
    """[K, 1000] coordinate logits and [K] logsumexp of all logits, both over the temperature -> as ``slot_losses``."""
    log_p = coord.log_softmax(-1)
    q = gaussian_targets(bins, rules=rules)
    soft_ce = -(q * log_p).sum(-1)
    w1 = (log_p.exp().cumsum(-1) - q.cumsum(-1)).abs().sum(-1) / NUM_BINS
    slots = rules.soft_ce_weight * soft_ce + rules.w1_weight * w1
    if rules.gate_weight:  # the difference is never negative but for rounding
        slots = slots + rules.gate_weight * (total - coord.logsumexp(-1)).clamp_min(0.0)
    return slots


@dataclass(frozen=True, slots=True, kw_only=True)
class _Targets:
    """A supervision as tensors; ``rows`` are logit indices (position - 1)."""

    text_rows: Tensor
    labels: Tensor
    weights: Tensor
    slot_rows: Tensor
    bins: Tensor


def _targets_of(supervision: Supervision, *, totals: LossTotals, device: torch.device) -> _Targets:
    text = [position for position, label in enumerate(supervision.labels) if label != IGNORED]
    if 0 in text or 0 in supervision.coord_positions:
        raise LearnError("the first token is supervised but has no logit", code="logits-misfit", key="0")
    _check_totals(supervision, totals)

    def whole(numbers: Iterable[int]) -> Tensor:
        return to_device(numbers, dtype=torch.int64, device=device)

    return _Targets(
        text_rows=whole(position - 1 for position in text),
        labels=whole(supervision.labels[position] for position in text),
        weights=to_device((supervision.weights[position] for position in text), dtype=torch.float32, device=device),
        slot_rows=whole(position - 1 for position in supervision.coord_positions),
        bins=whole(supervision.coord_bins),
    )


def _check_num_rows(num_rows: int, expected: int) -> None:
    if num_rows != expected:
        raise LearnError(
            f"{num_rows} rows of logits or hidden states for {expected} tokens", code="logits-misfit", key="logits"
        )


def _check_totals(supervision: Supervision, totals: LossTotals) -> None:
    text_weight, num_slots = fsum(supervision.weights), len(supervision.coord_positions)
    if num_slots > totals.num_slots or text_weight > totals.text_weight + 1e-6:
        raise LearnError(
            f"a row supervises {text_weight} of text and {num_slots} slots, the step {totals}",
            code="totals-too-small",
            key="totals",
            remedy="Count the totals over every row of the optimizer step.",
        )


def _score(logits: Logits, *, targets: _Targets, rules: LossRules, totals: LossTotals) -> LossTerms:
    logprobs = logprobs_of(logits[targets.text_rows], targets.labels)
    ce_sum = (targets.weights * -logprobs).sum()
    slots = _slots_of(logits[targets.slot_rows], bins=targets.bins, rules=rules)
    # Totals of zero mean sums of zero: any divisor will do.
    ce = ce_sum / (totals.text_weight or 1.0)
    coord = slots.sum() / (totals.num_slots or 1)
    return LossTerms(total=ce + coord, ce=ce.detach(), coord=coord.detach())


def _slots_of(logits: Logits, *, bins: Tensor, rules: LossRules) -> Tensor:
    if not rules.coord_ids:  # coordinates are numbers, learnt as text
        return bins.new_zeros(0, dtype=torch.float32)
    if isinstance(logits, Tensor):
        return slot_losses(widened(logits), bins=bins, rules=rules)

    def score(coord: Tensor, total: Tensor, truth: Tensor) -> Tensor:
        return coord_losses(coord, total, bins=truth, rules=rules)

    columns = to_device(rules.coord_ids, dtype=torch.int64, device=logits.device)
    return column_scores(logits, columns, bins, score=score, temperature=rules.temperature_coord)
