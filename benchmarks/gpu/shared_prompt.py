"""Learning from the completions of one prompt that is computed once, beside whole segments: a GRPO step of a 4B shape.

LoRA on a bfloat16 base under autocast, decoder layers compiled, nothing recomputed, as ``rollmatch train`` has it where
memory allows, with one limit of tokens of a pass. The bound is the ratio of tokens. Gradients are compared with those
of one segment after the other.
"""

import random

import torch

from benchmarks.gpu.measure import device, judge, matmul_tflops, on_gpu, say, take_turns
from benchmarks.gpu.packed_pass import make_model
from rollmatch.learn.attention import INSTALLED, PACKED_ATTENTION
from rollmatch.learn.balance import RowBalancer
from rollmatch.learn.batch import Batcher
from rollmatch.learn.head import Scoring
from rollmatch.model.decoder_layers import compile_layers
from rollmatch.model.images import NO_IMAGES
from rollmatch.objectives.grpo.loss import (
    PolicyRules,
    count_policy_totals,
    policy_logit_indices,
    policy_loss,
    supervise_policy,
)
from rollmatch.ranks import Ranks
from rollmatch.records import PolicyTarget, Sample, Segment

SHAPE = {
    "num_layers": 36, "hidden_len": 2560, "inner_len": 9728, "num_heads": 32, "num_groups": 8, "head_len": 128,
    "num_ids": 151_936, "matmul": 8192,
    "groups": {"text": (2048, 32, 256), "picture": (1200, 32, 400), "short": (90, 32, 512)}, "capacity": 9_600,
}  # fmt: skip
"""``groups``: tokens of a prompt, completions of all prompts, tokens of each. ``capacity``: most tokens of a pass."""
TINY = {
    "num_layers": 2, "hidden_len": 64, "inner_len": 96, "num_heads": 4, "num_groups": 2, "head_len": 16,
    "num_ids": 1500, "matmul": 64, "groups": {"text": (40, 16, 6), "short": (3, 16, 12)}, "capacity": 100,
}  # fmt: skip
SHAPES = {"full": SHAPE, "tiny": TINY}
GROUP_SIZE = 8
SHARE_BAR, NEVER_SLOWER = 0.85, 1.0


class Policy:
    """What GRPO supervises."""

    def supervise(self, segments, *, starts, num_tokens):
        return supervise_policy(segments, starts=starts, num_tokens=num_tokens)

    def logit_indices(self, supervision):
        return policy_logit_indices(supervision)


def segments_of(shape, group):
    """Completions of random tokens with random advantages, ``GROUP_SIZE`` of each prompt."""
    prompt_len, num, response_len = shape["groups"][group]
    dice = random.Random(0)

    def ids(count):
        return tuple(dice.randrange(shape["num_ids"]) for _ in range(count))

    made = []
    for index in range(num):
        if index % GROUP_SIZE == 0:
            prompt, sample = ids(prompt_len), Sample(sample_id=index, origin=f"x:{index}", images=())
        policy = PolicyTarget(advantages=(dice.uniform(-1, 1),) * response_len)
        token_ids = prompt + ids(response_len)
        made.append(
            Segment(
                sample=sample, policy_version=1, token_ids=token_ids, prompt_len=prompt_len, prefix_len=response_len,
                policy=policy,
            )
        )  # fmt: skip
    return made


class Step:
    """Forward and backward of a step's passes; keeps the loss."""

    def __init__(self, model, shape, group):
        self.model, self.scoring, self.losses = model, Scoring(model.get_base_model().lm_head), {}
        self.segments = segments_of(shape, group)
        self.rules = PolicyRules(max_new_tokens=shape["groups"][group][2], temperature=0.9)

    def way(self, name, *, shares, capacity):
        balancer = RowBalancer(ranks=Ranks(), capacity=capacity)
        batcher = Batcher(self.model, Policy(), packer=None, pad_id=0, balancer=balancer, shares_prompts=shares)
        batches = batcher.make(self.segments, lambda sample: NO_IMAGES, num_batches=1)
        totals = count_policy_totals([batch.supervision for batch in batches], list)

        def call():
            self.model.zero_grad(set_to_none=True)
            losses = []
            for batch in batches:
                rules = {"supervision": batch.supervision, "rules": self.rules, "totals": totals, "is_kept": True}
                with torch.autocast(device().type, dtype=torch.bfloat16, enabled=on_gpu()):
                    loss, _ = self.scoring(
                        self.model, batch.inputs, lambda logits, rules=rules: policy_loss(logits, **rules).total
                    )
                loss.backward()
                losses.append(loss.detach())
            self.losses[name] = torch.stack(losses).sum()

        return call, [batch.inputs["input_ids"].numel() for batch in batches]

    def gradient(self, call):
        call()
        return torch.cat([w.grad.float().flatten() for w in self.model.parameters() if w.grad is not None])


def measure(shape, *, rounds, limit_s):
    say("shared prompt: the model")
    if on_gpu():
        torch.cuda.empty_cache()
    tflops = matmul_tflops(shape["matmul"])
    model = make_model(shape)
    model.gradient_checkpointing_disable()
    model.get_base_model().config._attn_implementation = PACKED_ATTENTION
    if on_gpu():
        compile_layers(model.get_base_model())
    figures = {"shape": shape, "floor_matmul_tflops": tflops, "kernel": getattr(INSTALLED, "name", "") * on_gpu()}
    bars, groups = {}, {}
    for group in shape["groups"]:
        step = Step(model, shape, group)
        limit, longest = shape["capacity"], max(segment.encoded_len for segment in step.segments)
        shared, few = step.way("shared", shares=True, capacity=limit)
        whole, many = step.way("whole", shares=False, capacity=limit)
        one_by_one, _ = step.way("one by one", shares=False, capacity=longest)
        expected = step.gradient(one_by_one)
        differences = {
            name: float((step.gradient(call) - expected).norm() / expected.norm())
            for name, call in (("shared", shared), ("whole", whole))
        }
        bound = sum(many) / sum(few)
        measured = take_turns({"shared": shared, "whole": whole}, rounds=rounds, limit_s=limit_s)
        gain = measured["whole"]["median_s"] / measured["shared"]["median_s"]
        groups[group] = {
            "tokens": {"shared": few, "whole": many},
            "bound": bound,
            "gain": gain,
            "losses": {name: float(loss) for name, loss in step.losses.items()},
            "gradient_differences": differences,
            "measured": measured,
        }
        say(f"  {group}: {gain:.2f} x of at most {bound:.2f} x, gradients differ by {differences}")
        if group == "short":
            judge(bars, f"shared prompt, {group}, gain", gain, at_least=NEVER_SLOWER)
        else:
            judge(bars, f"shared prompt, {group}, share of the bound", gain / bound, at_least=SHARE_BAR)
        worse = differences["shared"] / differences["whole"]
        judge(bars, f"shared prompt, {group}, rounding of gradients beside packed whole segments'", worse, at_most=2.0)
    return figures | {"groups": groups, "bars": bars}
