"""Received tensors into vLLM's model, by vLLM's own loader (which fuses q, k, v and splits for tensor parallelism)."""

from collections.abc import Mapping

import torch

from rollmatch.errors import SyncError


class LoadFailed(SyncError):
    """vLLM's loader takes every tensor that was checked before."""

    code = "weights-broken"
    status = 409


@torch.no_grad()
def load_into(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """All tensors, by checkpoint name. Errors: ``LoadFailed``; the model may then hold a mixture."""
    try:
        model.load_weights(iter(tensors.items()))  # type: ignore[operator]
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise LoadFailed(
            f"vLLM's loader: {type(error).__name__}: {error}",
            key="load",
            remedy="Run a full sync; if it fails again, restart the server.",
        ) from error
