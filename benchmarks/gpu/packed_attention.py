"""The learner's attention kernel with the interface of ``flash_attn``, by which transformers calls a kernel."""

from types import SimpleNamespace

import torch

from rollmatch.learn.attention import INSTALLED


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float | None = None, causal: bool = True,
) -> torch.Tensor:  # fmt: skip
    """``q``: [T, H, D], ``k`` and ``v``: [T, G, D]; cumulative bounds of the sequences [S + 1] int32 -> [T, H, D]."""
    assert causal, "the kernel is described as causal"
    longest = int(max_seqlen_q), int(max_seqlen_k)
    pieces = SimpleNamespace(bounds=(cu_seqlens_q, cu_seqlens_k), longest=longest)
    return INSTALLED(q, k, v, pieces=pieces, scale=softmax_scale or q.shape[-1] ** -0.5)


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    """Attention of a batch without packing, which AsyncGRPO never asks for."""
    raise NotImplementedError
