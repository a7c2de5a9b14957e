"""Forward and backward of a packed row of an 8B-shaped LoRA model, beside its segments padded and one by one.

Weights are random, made on the device; adapters are float32 under autocast, the base is bfloat16, gradient
checkpointing is on: as ``rollmatch train`` has it. Every way scores in the head, by the same totals.
"""

import random
from dataclasses import replace

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.measure import device, judge, matmul_tflops, on_gpu, say, take_turns
from rollmatch.learn import attention
from rollmatch.learn.attention import INSTALLED, PACKED_ATTENTION
from rollmatch.learn.batch import Batcher
from rollmatch.learn.head import Scoring
from rollmatch.learn.pack import Packer
from rollmatch.model.images import NO_IMAGES
from rollmatch.objectives.rollout_matching.loss import (
    LossRules,
    count_totals,
    logit_indices,
    masked_loss,
    masked_loss_of_kept,
)
from rollmatch.objectives.rollout_matching.supervision import MaskRules, mask_segments
from rollmatch.records import Sample, Segment

SHAPE = {
    "num_layers": 36, "hidden_len": 4096, "inner_len": 12_288, "num_heads": 32, "num_groups": 8, "head_len": 128,
    "num_ids": 151_936, "capacity": 12_000, "lengths": (3100, 2700, 2300, 1960, 1580), "matmul": 8192,
}  # fmt: skip
TINY = {
    "num_layers": 2, "hidden_len": 64, "inner_len": 96, "num_heads": 4, "num_groups": 2, "head_len": 16,
    "num_ids": 1500, "capacity": 120, "lengths": (40, 31, 25, 20), "matmul": 64,
}  # fmt: skip
SHORT = SHAPE | {"lengths": (420, 260, 500, 340, 190, 610, 280, 388) * 3 + (450, 310, 520, 365, 287, 743)}
"""30 segments, as of small scenes."""
SHAPES = {"full": SHAPE, "short": SHORT, "tiny": TINY}
SUPERVISED, PROPORTIONAL_BAR, LOSS_BAR = 0.2, 0.97, 5e-3


def make_model(shape):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen3Config(
        vocab_size=shape["num_ids"],
        hidden_size=shape["hidden_len"],
        intermediate_size=shape["inner_len"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_groups"],
        head_dim=shape["head_len"],
        rope_parameters=rope,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    dtype, before = torch.bfloat16 if on_gpu() else torch.float32, torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device():
            base = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zeros would hide gradients of the other half
            torch.nn.init.normal_(weight, std=0.01)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


class Text:
    """What segments are to learn: text and coordinates of their tails."""

    def __init__(self, num_ids):
        self.first = num_ids - 1000
        self.rules = LossRules(coord_ids=tuple(range(self.first, num_ids)))

    def bin_of(self, token_id):
        return token_id - self.first if token_id >= self.first else None

    def supervise(self, segments, *, starts, num_tokens):
        return mask_segments(segments, starts=starts, num_tokens=num_tokens, rules=MaskRules(), bin_of=self.bin_of)

    def logit_indices(self, supervision):
        return logit_indices(supervision)


def segments_of(shape, text):
    """A fifth of each is a tail, and a quarter of that coordinates."""
    chooser = random.Random(0)

    def token(is_coord):
        return chooser.randrange(text.first, shape["num_ids"]) if is_coord else chooser.randrange(text.first)

    made = []
    for number, length in enumerate(shape["lengths"]):
        prompt_len = round((1 - SUPERVISED) * length)
        ids = tuple(token(place >= prompt_len and place % 4 == 0) for place in range(length))
        sample = Sample(sample_id=number, origin=f"x:{number}", images=())
        made.append(Segment(sample=sample, policy_version=1, token_ids=ids, prompt_len=prompt_len, prefix_len=0))
    return made


class Pass:
    """Forward and backward of the segments in one of several ways; keeps the loss and the gradient's length."""

    def __init__(self, model, shape):
        self.model, self.text = model, Text(shape["num_ids"])
        self.scoring = Scoring(model.get_base_model().lm_head)
        self.segments = segments_of(shape, self.text)
        packer = Packer(shape["capacity"], max_buffered=len(self.segments))
        self.packed = self._batches(packer, [self.segments])
        self.padded = self._batches(None, [self.segments])
        self.alone = [
            replace(one, inputs=unmasked(one.inputs)) for s in self.segments for one in self._batches(None, [[s]])
        ]
        self.totals = count_totals(batch.supervision for batch in self.packed)
        self.losses = {}

    def _batches(self, packer, groups):
        batcher = Batcher(self.model, self.text, packer=packer, pad_id=0)
        return [batch for group in groups for batch in batcher.make(group, lambda sample: NO_IMAGES, num_batches=1)]

    def run(self, name, batches, *, attn):
        def score(batch):
            form = masked_loss_of_kept if batch.is_packed else masked_loss
            return lambda logits: (
                form(logits, supervision=batch.supervision, rules=self.text.rules, totals=self.totals).total
            )

        def call():
            self.model.get_base_model().config._attn_implementation = attn
            self.model.zero_grad(set_to_none=True)
            losses = []
            for batch in batches:
                with torch.autocast(device().type, dtype=torch.bfloat16, enabled=on_gpu()):
                    loss, _ = self.scoring(self.model, batch.inputs, score(batch))
                loss.backward()
                losses.append(loss.detach())
            self.losses[name] = torch.stack(losses).sum()

        return call

    def ways(self):
        one_by_one = self.run("alone", self.alone, attn="sdpa")
        packed = self.run("packed", self.packed, attn=PACKED_ATTENTION)
        looped = self.run("packed_segment_by_segment", self.packed, attn=PACKED_ATTENTION)

        def without_kernel():
            chosen, attention.varlen_for = attention.varlen_for, lambda query, *, dropout: None
            try:
                looped()
            finally:
                attention.varlen_for = chosen

        return {
            "packed": packed,
            "packed_segment_by_segment": without_kernel,
            "padded": self.run("padded", self.padded, attn="sdpa"),
            "alone": one_by_one,
        }

    def gradient(self, call):
        call()
        return torch.cat([w.grad.float().flatten() for w in self.model.parameters() if w.grad is not None])


def unmasked(inputs):
    """A segment alone needs no mask, and without one transformers leaves causality to the kernel."""
    return {name: part for name, part in inputs.items() if name != "attention_mask"}


def measure(shape, *, rounds, limit_s):
    say("packed pass: the model")
    if on_gpu():
        torch.cuda.empty_cache()
    tflops = matmul_tflops(shape["matmul"])
    model = make_model(shape)
    num_weights = sum(weight.numel() for weight in model.parameters())
    say(f"  {num_weights / 1e9:.2f} B weights, matrix products at {tflops:.0f} TFLOP/s")
    one = Pass(model, shape)
    ways = one.ways()
    expected = one.gradient(ways["alone"])
    differences = {}
    for name in ("packed", "packed_segment_by_segment", "padded"):
        differences[name] = float((one.gradient(ways[name]) - expected).norm() / expected.norm())
    del expected
    measured = take_turns(ways, rounds=rounds, limit_s=limit_s)
    losses = {name: float(loss) for name, loss in one.losses.items()}
    num_tokens, places = sum(shape["lengths"]), max(shape["lengths"]) * len(shape["lengths"])
    kernel = INSTALLED if on_gpu() else None
    figures = {
        "shape": shape,
        "num_weights": num_weights,
        "num_tokens": num_tokens,
        "num_places_padded": places,
        "fill": num_tokens / shape["capacity"],
        "kernel": kernel.name if kernel else "one segment after the other",
        "floor_matmul_tflops": tflops,
        "losses": losses,
        "gradient_differences": differences,
        "measured": measured,
    }
    figures["reached_tflops"] = 6 * num_weights * num_tokens / measured["packed"]["median_s"] / 1e12
    say(f"  reached {figures['reached_tflops']:.0f} TFLOP/s (6 x weights x tokens: two forwards, gradients of inputs)")
    return figures | {"bars": bars_of(figures)}


def bars_of(figures):
    median = {name: one["median_s"] for name, one in figures["measured"].items()}
    bars = {}
    proportional = median["padded"] * figures["num_tokens"] / figures["num_places_padded"]
    share = proportional / median["packed"]
    judge(bars, "packed pass, padded time per place over packed time per token", share, at_least=PROPORTIONAL_BAR)
    ratio = median["alone"] / median["packed"]
    judge(bars, "packed pass, one by one over packed", ratio, at_least=PROPORTIONAL_BAR)
    worst = max(abs(loss / figures["losses"]["alone"] - 1) for loss in figures["losses"].values())
    judge(bars, "packed pass, largest relative difference of losses", worst, at_most=LOSS_BAR)
    return bars
