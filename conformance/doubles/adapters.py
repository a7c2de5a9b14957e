"""Adapters that do something: peft starts one half at zero, where they change nothing."""

import torch
from peft import LoraConfig, get_peft_model

from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3_vl


def perturb_adapters(policy, *, named="lora_", by=0.1, seed=1):
    """Add noise to what is so ``named``, the same noise wherever the policy is made."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if named in name:
                weight += by * torch.randn(weight.shape, generator=generator)
    return policy


def adapted(*, use_dora=False, model=None, **settings):
    """With adapters that do something, on attention and one vision layer."""
    model = model or make_tiny_qwen3_vl()
    targets = r".*(q_proj|v_proj|down_proj|linear_fc1)"
    config = LoraConfig(r=2, lora_alpha=3, target_modules=targets, use_dora=use_dora, **settings)
    return perturb_adapters(get_peft_model(model, config))
