"""Log-probabilities of sampled tokens on a GPU: the kernel beside vLLM's own."""

import pytest
import torch

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ids", [1500, 8192, 151_936])
def test_scores_and_ranks_are_those_of_vllm(num_ids, dtype):
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    from rollmatch.weights.worker.logprob_kernel import token_scores

    torch.manual_seed(0)
    logits = torch.randn(67, num_ids, device="cuda").mul_(4).to(dtype)
    token_ids = logits.argmax(-1)
    token_ids[::2] = torch.randint(num_ids, (34,), device="cuda")
    cut = logits < logits.gather(1, token_ids[:, None])
    cut[::3] = False
    logits.masked_fill_(cut, float("-inf"))  # as top-k and top-p leave them
    expected = compute_topk_scores(logits, 0, token_ids)
    scores, ranks = token_scores(logits, token_ids)
    torch.testing.assert_close(scores, expected.logprobs[:, 0], atol=2e-5, rtol=1e-5)
    assert torch.equal(ranks, expected.selected_token_ranks)
    exact = logits.double().log_softmax(-1).gather(1, token_ids[:, None])[:, 0]
    torch.testing.assert_close(scores.double(), exact, atol=2e-5, rtol=1e-5)
