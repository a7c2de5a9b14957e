"""GPU kernels in Triton's interpreter, which runs without a GPU, beside what torch computes."""

import sys

import pytest

from conformance.doubles.started import finish

INTERPRETER = """
import contextlib, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and "_C" not in name]:
    del sys.modules[name]  # whether it interprets is decided when it loads
import torch
torch.manual_seed(0)
torch.cuda.device = lambda device: contextlib.nullcontext()
"""
DIGEST = """
from rollmatch.weights.digest import MIX, mixed_digest_of, mixed_digests
from rollmatch.weights.digest_kernel import _BLOCK_WORDS, _CHUNK_WORDS, add_mixed_at
torch.Tensor.pin_memory = lambda tensor: tensor
words = [torch.randint(-2**62, 2**62, (num,)) for num in (1, _BLOCK_WORDS + 3, _CHUNK_WORDS + 7)]
sums = torch.zeros(len(words), 2, dtype=torch.int64)
add_mixed_at([part.data_ptr() for part in words], [len(part) for part in words], sums, MIX)
assert mixed_digests(sums) == [mixed_digest_of(part) for part in words]
add_mixed_at([], [], sums, MIX)
"""
MERGE = """
from rollmatch.model.merge import LoraFactors, merge_weight
from rollmatch.model.merge_kernel import KernelWork, merge_all_on_gpu, merge_on_gpu
torch.Tensor.pin_memory = lambda tensor: tensor
works, alone = [], []
for num_out, num_in, rank in ((37, 300, 3), (16, 256, 16), (5, 7, 20)):
    weight, a, b = torch.randn(num_out, num_in), torch.randn(rank, num_in), torch.randn(num_out, rank)
    for magnitude in (None, torch.rand(num_out) + 0.5):
        exact = merge_weight(weight, LoraFactors(lora_a=a, lora_b=b, magnitude=magnitude, scaling=0.7))
        memory = torch.full((num_out + 1, num_in), 7.0)
        merge_on_gpu(KernelWork(weight, a, b, magnitude, 0.7, memory[:-1]))
        torch.testing.assert_close(memory[:-1], exact, rtol=1e-4, atol=1e-4)
        assert (memory[-1] == 7).all(), "written behind the weight"
        halves = weight.half()[1:]  # which need not be aligned
        for into in works, alone:
            behind = torch.full((num_out, num_in), 7.0).half()
            into.append(KernelWork(halves, a, b[1:], None if magnitude is None else magnitude[1:], 0.7, behind[:-1]))
for work in alone:
    merge_on_gpu(work)
merge_all_on_gpu([*works, works[0]])
for one, listed in zip(alone, works):
    assert torch.equal(one.out, listed.out) and not (one.out == 7).all()
    assert (listed.out._base[-1] == 7).all(), "written behind the weight"
"""
SOFTMAX = """
from rollmatch.learn.softmax_kernel import _BLOCK, logsumexps_on_gpu, to_probs_on_gpu
for num_ids, temperature in ((5, 1.0), (2 * _BLOCK + 3, 0.5)):
    logits = torch.randn(3, num_ids) * 5
    logits[1, : min(num_ids - 2, _BLOCK + 1)] = float("-inf")
    logits[2] += 200
    exact, memory = logits.double() / temperature, torch.full((4, num_ids), 7.0)
    sums = logsumexps_on_gpu(logits, temperature)
    torch.testing.assert_close(sums.double(), exact.logsumexp(-1), rtol=1e-6, atol=1e-5)
    for factors in (None, torch.tensor([0.5, 2.0, 3.0])):
        probs = memory[:-1].copy_(logits)
        to_probs_on_gpu(probs, sums, temperature, factors)
        expected = exact.softmax(-1) * (1 if factors is None else factors[:, None])
        torch.testing.assert_close(probs.double(), expected, rtol=1e-3, atol=1e-7)
        assert (memory[-1] == 7).all(), "written behind the logits"
"""


@pytest.mark.parametrize("kernel", [DIGEST, MERGE, SOFTMAX], ids=["digest", "merge", "softmax"])
def test_a_kernel_makes_the_numbers_of_torch(kernel, tmp_path):
    code, output = finish([sys.executable, "-c", INTERPRETER + kernel], tmp_path / "log", TRITON_INTERPRET="1")
    assert code == 0, output[-2000:]
