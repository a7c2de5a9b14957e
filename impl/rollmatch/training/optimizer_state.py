"""The optimizer's state of weights that no step has moved yet, as FSDP2's checkpoints want it."""

import torch
from torch.optim import Optimizer


def complete_state(optimizer: Optimizer) -> None:
    """Give weights without a state that of a first step, so that a checkpoint holds one of each.

    A vision tower has none until a step has an image. PyTorch's checkpoints make the state by a step with gradients of
    zeros where all weights are without, and count it, so that Adam's next step is another one; where some are without,
    the checkpoint cannot be read again.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> complete_state(optimizer := torch.optim.AdamW([weight], lr=0.1))
    >>> {name: value.tolist() for name, value in optimizer.state[weight].items()}
    {'step': 0.0, 'exp_avg': [0.0, 0.0], 'exp_avg_sq': [0.0, 0.0]}
    >>> weight.tolist()
    [1.0, 1.0]
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    bare = [weight for weight in weights if not optimizer.state.get(weight)]
    if not bare:
        return
    grads, groups = [weight.grad for weight in weights], [dict(group) for group in optimizer.param_groups]
    for weight in weights:
        weight.grad = None
    for weight in bare:
        weight.grad = torch.zeros_like(weight)
    for group in optimizer.param_groups:
        group |= {name: 0.0 for name in ("lr", "weight_decay") if name in group}
    optimizer.step()
    for weight in bare:
        if "step" in (state := optimizer.state[weight]):
            state["step"] *= 0
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group |= before
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad
