"""Forward and backward of a 4B-shaped body: eager and compiled layers, with full, no and adaptive checkpointing.

Weights are random; adapters (r = 16 on all linear layers) are float32 under autocast, the base is bfloat16. A pass
takes several micro-batches of packed rows, as a step does. Useful work per weight and token: 4 FLOP with frozen weights
(forward, gradient of inputs), 6 with trained ones; recomputation does not count.
"""

from contextlib import ExitStack

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.measure import device, judge, matmul_tflops, on_gpu, say, take_turns
from rollmatch.learn.attention import PACKED_ATTENTION, pieces_of
from rollmatch.learn.checkpointing import AdaptiveCheckpointing
from rollmatch.model.decoder_layers import compile_layers, decoder_layers
from rollmatch.rollout.hf import eager

SHAPE = {
    "num_layers": 36, "hidden_len": 2560, "inner_len": 9728, "num_heads": 32, "num_groups": 8, "head_len": 128,
    "num_ids": 151_936, "lengths": (602,) * 16, "num_rows": 4, "matmul": 8192, "backend": "inductor",
}  # fmt: skip
TINY = {
    "num_layers": 3, "hidden_len": 64, "inner_len": 96, "num_heads": 4, "num_groups": 2, "head_len": 16,
    "num_ids": 500, "lengths": (20, 9, 14), "num_rows": 2, "matmul": 64, "backend": "aot_eager",
}  # fmt: skip
SHAPES = {"full": SHAPE, "tiny": TINY}
SPEED_BAR, LOSS_BAR = 1.8, 2e-3


def make_model(shape, *, adapters):
    config = Qwen3Config(
        vocab_size=shape["num_ids"],
        hidden_size=shape["hidden_len"],
        intermediate_size=shape["inner_len"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_groups"],
        head_dim=shape["head_len"],
        tie_word_embeddings=True,
        attn_implementation=PACKED_ATTENTION,
    )
    torch.manual_seed(0)
    with device():
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16 if on_gpu() else torch.float32)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def rows_of(shape):
    """Keyword arguments of each micro-batch: a packed row."""
    lengths, rows = shape["lengths"], []
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device())
    words = {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(device()),
        "cu_seq_lens_q": bounds,
        "pieces": pieces_of((bounds, bounds), num_tokens=sum(lengths), device=device()),
        "use_cache": False,
    }
    for number in range(shape["num_rows"]):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(shape["num_ids"], (1, sum(lengths)), generator=generator).to(device())
        rows.append({"input_ids": ids} | words)
    return rows


class Step:
    """One pass over all rows, in one of several ways; keeps losses and the gradient of the first trained weight."""

    def __init__(self, model, base, rows):
        self.model, self.base, self.rows, self.losses = model, base, rows, {}

    def way(self, name, *, compiled, checkpointed):
        def call():
            self.model.zero_grad(set_to_none=True)
            for layer in decoder_layers(self.base):
                layer.gradient_checkpointing = checkpointed is not False
            with ExitStack() as stack:
                if not compiled:
                    stack.enter_context(eager(self.base))
                losses = [self._learn(row, adaptive=checkpointed == "auto") for row in self.rows]
            self.losses[name] = torch.stack(losses).mean()

        return call

    def _learn(self, row, *, adaptive):
        if adaptive and self.adaptive is None:
            self.adaptive = AdaptiveCheckpointing(self.base.model, decoder_layers(self.base), share=0.9)
        with torch.autocast(device().type, dtype=torch.bfloat16, enabled=on_gpu()):
            loss = self.base.model(**row).last_hidden_state.float().pow(2).mean()
        loss.backward()
        return loss.detach()

    adaptive = None


def ways_of(step):
    ways = {
        "eager_checkpointed": step.way("eager_checkpointed", compiled=False, checkpointed=True),
        "eager_kept": step.way("eager_kept", compiled=False, checkpointed=False),
        "compiled_checkpointed": step.way("compiled_checkpointed", compiled=True, checkpointed=True),
        "compiled_kept": step.way("compiled_kept", compiled=True, checkpointed=False),
    }
    if on_gpu():
        ways["compiled_auto"] = step.way("compiled_auto", compiled=True, checkpointed="auto")
    return ways


def measure(shape, *, rounds, limit_s):
    figures = {"shape": shape, "floor_matmul_tflops": matmul_tflops(shape["matmul"]), "measured": {}}
    bars = {}
    for kind in ("lora", "full"):
        say(f"decoder layers, {kind}")
        if on_gpu():
            torch.cuda.empty_cache()
        model = make_model(shape, adapters=kind == "lora")
        base = model.get_base_model() if kind == "lora" else model
        compile_layers(base, backend=shape["backend"])
        step = Step(model, base, rows_of(shape))
        measured = figures["measured"][kind] = _measure(step, rounds=rounds, limit_s=limit_s)
        num_body = sum(weight.numel() for weight in base.model.parameters()) - base.lm_head.weight.numel()
        work = (4 if kind == "lora" else 6) * num_body * sum(shape["lengths"]) * shape["num_rows"]
        for one in measured.values():
            one["share_of_matmul"] = work / one["median_s"] / 1e12 / figures["floor_matmul_tflops"]
        losses = {name: float(loss) for name, loss in step.losses.items()}
        figures[f"losses_{kind}"] = losses
        worst = max(abs(loss / losses["eager_kept"] - 1) for loss in losses.values())
        judge(bars, f"{kind}: largest relative difference of losses", worst, at_most=LOSS_BAR)
        ratio = measured["eager_checkpointed"]["median_s"] / measured["compiled_kept"]["median_s"]
        judge(bars, f"{kind}: eager with checkpointing over compiled without", ratio, at_least=SPEED_BAR)
        del model, base, step
    return figures | {"bars": bars}


def _measure(step, *, rounds, limit_s):
    """All ways in turn; the adaptive one measures its first passes alone, and is taken apart afterwards."""
    ways = ways_of(step)
    adaptive = {name: call for name, call in ways.items() if name.endswith("_auto")}
    measured = take_turns({n: c for n, c in ways.items() if n not in adaptive}, rounds=rounds, limit_s=limit_s)
    for name, call in adaptive.items():
        call()
        measured |= take_turns({name: call}, rounds=rounds, limit_s=limit_s / 3)
        measured[name]["layers_kept"] = step.adaptive.num_kept
        step.adaptive.close()
    for name, one in measured.items():
        say(f"  {name}: {one['median_s']:.3f} s, peak {one['peak_bytes'] / 1e9:.1f} GB")
    return measured
