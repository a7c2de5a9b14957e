"""Scores made a chunk of rows at a time: those of whole logits, in value and grad_hidden, and never whole logits."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.doubles.loss_cases import FIELDS, RULES, mask_row, masked_loss_from_hidden, same_terms, scoring_of
from conformance.doubles.models import TOLERANCE
from conformance.doubles.tiny_qwen3_vl import VOCAB_LEN
from rollmatch.learn import head as head_file
from rollmatch.learn.head import HeadStates, logprobs_of
from rollmatch.objectives.rollout_matching.loss import (
    logit_indices,
    masked_loss_of_kept,
)

HIDDEN_LEN, SHORT_LEN = 16, 4
SMALL = 9 * VOCAB_LEN * 4
"""Bytes of a chunk of 9 rows in float32."""


def make_head(hidden_len=HIDDEN_LEN, *, dtype=torch.float32, bias=True, num_ids=VOCAB_LEN):
    torch.manual_seed(0)
    return torch.nn.Linear(hidden_len, num_ids, bias=bias, dtype=dtype).requires_grad_(False)


def graded(score, hidden):
    states = hidden.clone().requires_grad_()
    out = score(states)
    out.backward()
    return out.detach(), states.grad


@pytest.mark.parametrize(
    ("chunk_bytes", "gate_weight", "bias"),
    [(1, 0.5, True), (SMALL, 0.5, False), (SMALL, 0.0, True), (10**9, 0.5, True)],
)
def test_a_head_that_does_not_learn_gives_the_loss_and_gradient_of_whole_logits(
    chunk_bytes, gate_weight, bias, batch, monkeypatch
):
    monkeypatch.setattr(head_file, "CHUNK_BYTES", chunk_bytes)
    row, _ = batch
    supervision = mask_row(row)
    rules = replace(RULES, gate_weight=gate_weight, temperature_coord=1.3)
    scoring = scoring_of(supervision, rules)
    head, hidden = make_head(bias=bias), torch.randn(row.num_tokens, HIDDEN_LEN)
    terms = []

    def ours(states):
        terms.append(masked_loss_from_hidden(states, lm_head=head, **scoring))
        return terms[-1].total

    def plain(states):
        terms.append(masked_loss_of_kept(head(states[list(logit_indices(supervision))]), **scoring))
        return terms[-1].total

    (_, mine), (_, theirs) = graded(ours, hidden), graded(plain, hidden)
    same_terms(*terms)
    torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    assert [field for field in FIELDS if getattr(terms[0], field).requires_grad] == ["total"]


class LogitsMade(TorchDispatchMode):
    """Rows of each matrix product that makes logits."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and made.shape[-1] == VOCAB_LEN:
            self.rows.append(len(made))
        return made


def test_logits_exist_for_a_chunk_at_a_time_and_are_made_once(batch, monkeypatch):
    monkeypatch.setattr(head_file, "CHUNK_BYTES", SMALL)
    row, _ = batch
    supervision = mask_row(row)
    hidden = torch.randn(row.num_tokens, HIDDEN_LEN, requires_grad=True)
    with LogitsMade() as made:
        masked_loss_from_hidden(hidden, lm_head=make_head(), **scoring_of(supervision)).total.backward()
    assert max(made.rows) == 9
    assert sum(made.rows) == len(logit_indices(supervision)) < row.num_tokens


@pytest.mark.parametrize("learns", [False, True])
def test_states_get_the_gradient_that_whole_logits_give_them(learns):
    """A head that learns is called again, and gets its own; at a temperature, without ids that are excluded."""
    num_rows, score = 2 * head_file.CHUNK_LEN + 1, partial(logprobs_of, temperature=0.7, excluded_ids=(2, 5))
    head, ids = make_head().requires_grad_(learns), torch.arange(num_rows) + 6
    hidden = torch.randn(num_rows, HIDDEN_LEN, requires_grad=True)
    weights, leaves = torch.rand(num_rows), [hidden, *([head.weight] if learns else [])]
    assert (HeadStates.of(hidden, head).weight is None) == learns
    ours, whole = (
        torch.autograd.grad((score(logits, ids) * weights).sum(), leaves)
        for logits in (HeadStates.of(hidden, head), head(hidden))
    )
    for one, other in zip(ours, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_head_with_anything_around_its_weight_is_called():
    class Doubled(torch.nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    head = Doubled(HIDDEN_LEN, 8).requires_grad_(False)
    hidden, ids = torch.randn(3, HIDDEN_LEN), torch.tensor([1, 2, 3])
    assert HeadStates.of(hidden, head).weight is None
    torch.testing.assert_close(logprobs_of(HeadStates.of(hidden, head), ids), logprobs_of(head(hidden), ids))


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_scores_of_odd_logits_unlikely_tokens_and_no_rows(odd):
    head, hidden = make_head(), torch.randn(2, HIDDEN_LEN)
    hidden[0, 0] = odd
    assert logprobs_of(HeadStates.of(hidden, head), torch.tensor([1, 2])).isfinite().tolist() == [False, True]
    steep = torch.nn.Linear(1, 3, bias=False).requires_grad_(False)
    steep.weight.copy_(torch.tensor([[0.0], [500.0], [-500.0]]))
    assert logprobs_of(HeadStates.of(torch.ones(1, 1), steep), torch.tensor([2])).tolist() == [-1000.0]
    nothing = torch.zeros(0, HIDDEN_LEN, requires_grad=True)
    scores = logprobs_of(HeadStates.of(nothing, head), torch.zeros(0, dtype=torch.int64))
    scores.sum().backward()
    assert (scores.shape, nothing.grad.shape) == ((0,), (0, HIDDEN_LEN)), "a graph, too"
