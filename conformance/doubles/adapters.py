"""Adapters that do something: peft starts one half at zero, where they change nothing."""

import torch


def perturb_adapters(policy, *, named="lora_", by=0.1, seed=1):
    """Add noise to what is so ``named``, the same noise wherever the policy is made."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if named in name:
                weight += by * torch.randn(weight.shape, generator=generator)
    return policy
