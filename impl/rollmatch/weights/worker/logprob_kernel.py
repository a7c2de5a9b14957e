"""The log-probability and the rank of one token a row, in one pass over the logits that all of a GPU takes part in.

vLLM's own kernels (0.26) give each row to one of the GPU's multiprocessors, which reads it three times.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsTensors

_BLOCK = 8192


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _look(logits, stride, ids, tops, sums, ranks, num_ids, num_parts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """One part of a row: its largest logit, the sum of exponentials below that, how many are at least the token's."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = part * BLOCK + tl.arange(0, BLOCK)
    is_there = places < num_ids
    values = tl.load(logits + row * stride + places, mask=is_there, other=float("-inf")).to(tl.float32)
    own = tl.load(logits + row * stride + tl.load(ids + row)).to(tl.float32)
    top = tl.max(values, axis=0)
    finite = tl.where(top == float("-inf"), 0.0, top)  # of a part that top-k or top-p cut off
    tl.store(tops + row * num_parts + part, top)
    tl.store(sums + row * num_parts + part, tl.sum(tl.exp(values - finite), axis=0))
    tl.store(ranks + row * num_parts + part, tl.sum(((values >= own) & is_there).to(tl.int32), axis=0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _join(logits, stride, ids, tops, sums, ranks, scores, total_ranks, num_parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    is_there = parts < num_parts
    own = tl.load(logits + row * stride + tl.load(ids + row)).to(tl.float32)
    part_tops = tl.load(tops + row * num_parts + parts, mask=is_there, other=float("-inf"))
    top = tl.max(part_tops, axis=0)
    part_sums = tl.load(sums + row * num_parts + parts, mask=is_there, other=0.0)
    tl.store(scores + row, own - top - tl.log(tl.sum(part_sums * tl.exp(part_tops - top), axis=0)))
    part_ranks = tl.load(ranks + row * num_parts + parts, mask=is_there, other=0)
    tl.store(total_ranks + row, tl.sum(part_ranks, axis=0).to(tl.int64))


def token_scores(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability (float32) and rank (int64, from 1) of one token a row.

    ``logits``: [rows, ids] on a GPU, ids next to each other; ``token_ids``: int64, [rows].
    """
    num_rows, num_ids = logits.shape
    num_parts = triton.cdiv(num_ids, _BLOCK)
    tops, sums = (torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device) for _ in range(2))
    ranks = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    scores = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    total_ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    given = (logits, logits.stride(0), token_ids, tops, sums, ranks)
    _look[(num_rows, num_parts)](*given, num_ids, num_parts, BLOCK=_BLOCK, num_warps=8)
    _join[(num_rows,)](*given, scores, total_ranks, num_parts, PARTS=triton.next_power_of_2(num_parts), num_warps=1)
    return scores, total_ranks


def install() -> None:
    """Let vLLM's sampler use it where nothing but the sampled token's log-probability is asked for."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import sampler

    theirs = sampler.compute_topk_scores

    def scores(
        logits: Tensor, num_logprobs: int, sampled: Tensor, rows: list[int] | None = None, **rest: Any
    ) -> "LogprobsTensors":
        if num_logprobs or rest.get("max_per_req_token_ids") or rest.get("logits_mode"):
            return theirs(logits, num_logprobs, sampled, rows, **rest)
        values, ranks = token_scores(logits, sampled)
        return LogprobsTensors(sampled.unsqueeze(-1), values.unsqueeze(-1), ranks, rows)

    sampler.compute_topk_scores = scores
