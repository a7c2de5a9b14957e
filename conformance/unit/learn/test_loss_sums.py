"""The same loss and the same gradient however the work is cut: forms, chunks, rows, batches."""

import pytest
import torch

from conformance.doubles.loss_cases import (
    FIELDS,
    MASK,
    RULES,
    mask_padded,
    mask_row,
    masked_loss_from_hidden,
    random_logits,
    row_of,
    same_terms,
    scoring_of,
)
from conformance.doubles.models import (
    TOLERANCE,
    assert_same_gradients,
    gradients,
    packed_logits,
    padded_logits,
    single_logits,
)
from conformance.doubles.segments import make_segment
from conformance.doubles.tiny_qwen3_vl import VOCAB_LEN
from rollmatch.learn import head as head_file
from rollmatch.learn.batch import make_model_inputs
from rollmatch.objectives.rollout_matching.loss import (
    LossTotals,
    count_totals,
    logit_indices,
    masked_loss,
    masked_loss_of_kept,
)
from rollmatch.objectives.rollout_matching.supervision import IGNORED, mask_segment


@pytest.mark.parametrize("chunk_len", [1, 7, 1024])
def test_the_three_forms_agree_in_value_and_gradient(chunk_len, batch, monkeypatch):
    monkeypatch.setattr(head_file, "CHUNK_LEN", chunk_len)
    row, _ = batch
    supervision = mask_row(row)
    scoring = scoring_of(supervision)
    torch.manual_seed(0)
    head = torch.nn.Linear(16, VOCAB_LEN)
    hidden = torch.randn(row.num_tokens, 16)

    def graded(score):
        states = hidden.clone().requires_grad_()
        head.zero_grad()
        terms = score(states)
        terms.total.backward()
        return terms, states.grad, head.weight.grad.clone()

    plain = graded(lambda states: masked_loss(head(states), **scoring))
    kept = graded(lambda states: masked_loss_of_kept(head(states[list(logit_indices(supervision))]), **scoring))
    chunked = graded(lambda states: masked_loss_from_hidden(states, lm_head=head, **scoring))
    for other in (kept, chunked):
        same_terms(other[0], plain[0])
        torch.testing.assert_close(other[1:], plain[1:], rtol=TOLERANCE, atol=TOLERANCE)


def test_hidden_states_meet_the_head_one_chunk_at_a_time(batch, monkeypatch):
    monkeypatch.setattr(head_file, "CHUNK_LEN", 5)
    row, _ = batch
    supervision = mask_row(row)
    seen = []

    def head(states):
        seen.append(len(states))
        return states

    hidden = random_logits(row.num_tokens).requires_grad_()
    masked_loss_from_hidden(hidden, lm_head=head, **scoring_of(supervision))
    assert max(seen) == 5
    supervised = sum(label != IGNORED for label in supervision.labels) + len(supervision.coord_positions)
    assert sum(seen) == supervised < row.num_tokens


def test_a_model_that_keeps_only_these_logits_gives_the_same_loss(model, batch):
    row, images = batch
    supervision = mask_row(row)
    scoring = scoring_of(supervision)
    inputs = make_model_inputs(row, images=images, model=model)
    with torch.no_grad():
        kept = model(**inputs, logits_to_keep=torch.tensor(logit_indices(supervision))).logits[0]
        whole = packed_logits(model, row, images)
        hidden = model.model(**inputs).last_hidden_state[0]
    plain = masked_loss(whole, **scoring)
    same_terms(masked_loss_of_kept(kept, **scoring), plain)
    same_terms(masked_loss_from_hidden(hidden, lm_head=model.lm_head, **scoring), plain)


def summed(terms):
    return {field: sum(getattr(one, field).item() for one in terms) for field in FIELDS}


@pytest.mark.scenario(clauses=["supervision/the-loss-does-not-depend-on-how-a-step-is-cut-up#1,2"])
def test_packed_rows_segments_alone_and_a_padded_batch_give_one_loss_and_one_gradient(model, pairs):
    totals = count_totals([mask_segment(segment, **MASK) for segment, _ in pairs])

    def score(logits, supervision):
        terms = masked_loss(logits, supervision=supervision, rules=RULES, totals=totals)
        terms.total.backward()
        return terms

    def run(*scored):
        model.zero_grad()
        return summed([score(*one()) for one in scored]), gradients(model)

    def packed(some):
        row, images = row_of(some)
        return lambda: (packed_logits(model, row, images), mask_row(row))

    def alone(segment, images):
        return lambda: (single_logits(model, segment, images), mask_segment(segment, **MASK))

    def padded():
        segments, images = zip(*pairs, strict=True)
        return padded_logits(model, segments, images).flatten(0, 1), mask_padded(segments)

    one_row = run(packed(pairs))
    for other in (
        run(*(alone(*pair) for pair in pairs)),
        run(packed(pairs[:1]), packed(pairs[1:])),
        run(packed(pairs[2:]), packed(pairs[:2])),
        run(padded),
    ):
        assert other[0] == pytest.approx(one_row[0], rel=TOLERANCE)
        assert_same_gradients(other[1], one_row[1])


def test_totals_count_weights_and_slots():
    segment, _ = make_segment(0)
    supervision = mask_segment(segment, **MASK)
    hard = sum(weight == 1 for weight in supervision.weights)
    totals = count_totals([supervision, supervision])
    assert totals.text_weight == pytest.approx(2 * (hard + 3 * 0.3))
    assert totals.num_slots == 16
    assert count_totals([]) == LossTotals(text_weight=0.0, num_slots=0)
