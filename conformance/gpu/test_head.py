"""The loss inside the head on a GPU: in bfloat16 as good as whole logits, in half a gigabyte."""

import pytest
import torch

from conformance.doubles.loss_cases import masked_loss_from_hidden
from rollmatch.learn.head import HeadStates, logprobs_of
from rollmatch.learn.softmax import logsumexps, to_probs
from rollmatch.objectives.rollout_matching.loss import LossRules, count_totals
from rollmatch.objectives.rollout_matching.supervision import IGNORED
from rollmatch.records import Supervision

NUM_IDS, HIDDEN_LEN, NUM_ROWS = 151_936, 1024, 2048

pytestmark = pytest.mark.gpu(1)


@pytest.fixture(scope="module")
def head():
    torch.manual_seed(0)
    made = torch.nn.Linear(HIDDEN_LEN, NUM_IDS, bias=False, device="cuda", dtype=torch.bfloat16)
    return made.requires_grad_(False)


def hidden_of(num_rows):
    torch.manual_seed(1)
    return torch.randn(num_rows, HIDDEN_LEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_slopes_are_as_close_to_the_truth_as_those_of_whole_logits(head, temperature):
    hidden, ids = hidden_of(600), torch.arange(600, device="cuda") * 200

    def graded(logits, states):
        scores = logprobs_of(logits, ids, temperature=temperature)
        return scores.detach(), torch.autograd.grad(scores.sum(), states)[0].float()

    ours = graded(HeadStates.of(hidden, head), hidden)
    plain = graded(head(hidden), hidden)
    exact_states = hidden.detach().float().requires_grad_()
    exact = graded(exact_states @ head.weight.float().T, exact_states)
    for mine, other, true in zip(ours, plain, exact, strict=True):
        assert (mine - true).norm() < 1.2 * (other - true).norm() + 1e-6 * true.norm()


def test_a_row_of_large_vocabulary_takes_half_a_gigabyte(head):
    labels = tuple(7 if place % 4 == 1 else IGNORED for place in range(NUM_ROWS * 4))
    coords = tuple(range(2, NUM_ROWS * 4, 16))
    supervision = Supervision(
        labels=labels,
        weights=tuple(float(label != IGNORED) for label in labels),
        coord_positions=coords,
        coord_bins=tuple(place % 1000 for place in coords),
    )
    rules = LossRules(coord_ids=tuple(range(150_000, 151_000)), gate_weight=0.5)
    hidden = hidden_of(len(labels))
    hidden.grad = torch.zeros_like(hidden)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    terms = masked_loss_from_hidden(
        hidden, lm_head=head, supervision=supervision, rules=rules, totals=count_totals([supervision])
    )
    terms.total.backward()
    assert terms.total.isfinite()
    assert torch.cuda.max_memory_allocated() - before < 0.5e9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_softmax_over_logits_is_torchs(dtype, temperature):
    torch.manual_seed(2)
    logits = (torch.randn(300, 10_007, device="cuda") * 5).to(dtype)
    logits[7, :9_000] = float("-inf")  # ids that a head rules out, more of them than a kernel reads at a time
    factors = torch.rand(300, device="cuda")
    exact = logits.double() / temperature
    everything = logsumexps(logits, temperature)
    torch.testing.assert_close(everything.double(), exact.logsumexp(-1), rtol=1e-6, atol=1e-5)
    probs = logits.clone()
    to_probs(probs, everything, temperature)
    torch.testing.assert_close(
        probs, exact.softmax(-1).to(dtype), rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-7
    )
    to_probs(logits, everything, temperature, factors=factors)
    torch.testing.assert_close(logits.float(), probs.float() * factors[:, None], rtol=2e-2, atol=1e-6)
