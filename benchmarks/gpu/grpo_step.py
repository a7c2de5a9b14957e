"""A whole GRPO step of ours beside TRL's, each with its own server: one GPU generates, one learns.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.grpo_step

Needs TRL 1.10 and two GPUs; with ``--mode colocate`` one, on which both sides generate and learn in turn. The model has
the shape of Qwen3-4B and random weights in bfloat16, so that nearly every response is as long as it may be: 16 prompts
of 90 tokens x 8 completions of 512. ``uneven`` gives it a stop token whose probability makes responses 300 tokens long
on average, and at most 1,024; ``long`` has 4 prompts and responses of 4,096; ``small`` is a model of 135M shape whose
responses have 15 tokens on average and at most 48. A case is a kind of training with lengths,
and ways of ours, ``lora-uneven:off,tokens``; all learn in micro-batches of 16 but for ``tokens``. A server of each side
stays up for all cases, both on one GPU with an equal share of its memory, and only one of them is in use at a time.
``--rehearse`` runs our side on a tiny model without GPUs. Every case has a JSON, to which the samples of a later run
are added; ratios are of medians without the first step, which compiles and captures. ``learn_share`` is the share of
the matrix rate of this GPU that our learning reaches, recomputation and padding not counted. TRL recomputes every
layer; ours does so with the way ``checkpointed``, to compare the peaks of memory. ``--sides ours trl-async --cases
full-even:ahead`` is beside TRL's AsyncGRPO (all weights, no adapters), which recomputes nothing here.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.gpu.grpo_sides import WAYS, AsyncTrlSide, OurSide, TrlSide, longest_of
from benchmarks.gpu.machine import describe
from benchmarks.gpu.random_qwen3 import SHAPE, SHAPE_135M, SMALL_MODEL, make_model, shaped
from benchmarks.gpu.report import RESULTS, folder_of

FULL = {"num_prompts": 16, "num_generations": 8, "micro_batch": 16, "prompt_len": 90, "steps": 4}
TINY = {"num_prompts": 2, "num_generations": 4, "micro_batch": 4, "prompt_len": 20, "response_len": 24, "steps": 2}
LENGTHS = {
    "even": {"response_len": 512},
    "uneven": {"response_len": 1024, "mean_len": 300, "steps": 3},
    "long": {"response_len": 4096, "num_prompts": 4, "steps": 3},
    "small": {"response_len": 48, "mean_len": 15, "steps": 12},
}
SHAPES = {"small": SHAPE_135M}
BARS = {"even": {"off / trl": 0.5, "ahead / trl": 0.33}, "uneven": {"off / trl": 0.4}, "long": {}, "small": {}}
"""At most; with LoRA, a server and two GPUs."""
SIDES = {"ours": OurSide, "trl": TrlSide, "trl-async": AsyncTrlSide}
SHOWN = ("uneven", "long", "small", "colocate")
"""Parts of a result's name that say what is not the default."""


def ratios(samples):
    """Median seconds without the first step, and ratios of the medians per response token."""
    later = {way: measured["steps"][1:] for way, measured in samples.items()}
    middle = {way: statistics.median(step["step_s"] for step in steps) for way, steps in later.items()}
    each = {way: statistics.median(s["step_s"] / s["response_tokens"] for s in steps) for way, steps in later.items()}
    peers = [way for way in each if way not in WAYS]
    return middle, {f"{way} / {peer}": each[way] / each[peer] for peer in peers for way in each if way in WAYS}


def peaks(samples):
    """Peak GPU memory in tensors of each way's learner, a colocated engine included. Unit: GB."""
    ours = {way: measured["memory"]["peak_gb"] for way, measured in samples.items() if measured.get("memory")}
    return ours | {way: measured["peak_bytes"] / 1e9 for way, measured in samples.items() if "peak_bytes" in measured}


def matrix_rate(device):
    """FLOP/s of a large bfloat16 product on this GPU."""
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for num_products in (3, 20):  # the first ones warm up
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(num_products):
            left @ right
        torch.cuda.synchronize(device)
    return 20 * 2 * 8192**3 / (time.perf_counter() - began)


def phases(steps):
    """Median seconds of each phase without the first step."""
    return {
        name: statistics.median(step[name] for step in steps[1:]) for name in steps[0] if not name.endswith("tokens")
    }


def learn_shares(steps, kind, *, shape, rate):
    """Useful FLOP/s of each step's learning by ``rate``: per weight and token 4 with frozen weights, else 6, the head
    for responses only, attention left out."""
    model = shaped(shape)
    num_body = sum(weight.numel() for weight in model.model.layers.parameters())
    per_weight, num_head = 4 if kind == "lora" else 6, model.lm_head.weight.numel()
    works = [per_weight * (num_body * step["learn_tokens"] + num_head * step["response_tokens"]) for step in steps]
    return [work / step["learn"] / rate for work, step in zip(works, steps, strict=True)]


class Case:
    """One kind of training with one kind of lengths, and the file of its samples."""

    def __init__(self, options, words):
        name, _, ways = words.partition(":")
        self.kind, lengths = name.split("-")
        self.shape = SHAPES.get(lengths, SHAPE)
        self.ways = ways.split(",") if ways else ["off"]
        self.is_rehearsal = options.rehearse
        assert set(self.ways) <= set(WAYS), f"{words}: ways are {', '.join(WAYS)}"
        self.scale = TINY if options.rehearse else FULL | LENGTHS[lengths]
        self.scale |= {"steps": options.steps or self.scale["steps"]}
        self.model = SMALL_MODEL if options.rehearse else Path(f"{options.model}-{lengths}")
        self.name = "-".join(["grpo_step", self.kind, *(part for part in (lengths, options.mode) if part in SHOWN)])
        self.path = options.results / f"{self.name}.json"
        bars = BARS[lengths] if (self.kind, options.mode) == ("lora", "server") else {}
        memory = options.engine_memory if options.mode == "colocate" else options.server_memory
        new = {"machine": describe(), "bars": bars, "engine_memory": memory, "samples": {}}
        self.measured = json.loads(self.path.read_text()) if self.path.exists() else new

    def prepare(self):
        """Its model."""
        if not self.model.exists():
            make_model(self.model, self.scale.get("mean_len"), self.shape)

    def add(self, samples, learner_device):
        """Samples by way, and what follows from all."""
        self.measured["samples"] |= samples
        self.measured["median_s"], self.measured["ratios"] = ratios(self.measured["samples"])
        self.measured["peak_gb"] = peaks(self.measured["samples"])
        self.measured["phase_s"] = {way: phases(one["steps"]) for way, one in self.measured["samples"].items()}
        ours = {way: one["steps"][1:] for way, one in self.measured["samples"].items() if way in WAYS}
        if not self.is_rehearsal:
            self.measured["matrix_tflops"] = (rate := matrix_rate(learner_device)) / 1e12
            self.measured["learn_share"] = {
                way: learn_shares(steps, self.kind, shape=self.shape, rate=rate) for way, steps in ours.items()
            }
        self.path.write_text(json.dumps(self.measured, indent=1) + "\n")
        shown = {name: value for name, value in self.measured.items() if name not in ("samples", "machine")}
        sys.stdout.write(json.dumps({self.name: shown}, indent=1) + "\n")
        sys.stdout.flush()


def main():
    options = parse()
    cases = [Case(options, words) for words in options.cases]
    learner_device = torch.device("cuda", 0 if options.mode == "colocate" else 1)
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        folder = Path(name)
        sides = {side: SIDES[side](options, folder) for side in options.sides}
        for case in cases:
            case.prepare()
        try:
            if options.mode == "server":
                start_servers(sides, cases, servers)
            for case in cases:
                for side in sides.values():
                    for way, samples in side.samples(case):
                        case.add({way: samples}, learner_device)
        finally:
            (logs := options.results / "logs").mkdir(parents=True, exist_ok=True)
            for log in folder.glob("*.txt"):
                shutil.copy(log, logs)


def start_servers(sides, cases, stack):
    """All at once, with room for the longest case; their weights come from the learners."""
    longest = max(cases, key=lambda case: longest_of(case.scale))
    for side in sides.values():
        side.start_server(stack, cases[0].model, longest.scale)
    for name, side in sides.items():
        sys.stdout.write(f"server of {name}: ready after {side.wait_ready():.1f} s\n")
        sys.stdout.flush()


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir(), "grpo-step-model"))
    parser.add_argument("--cases", nargs="+", default=["lora-even:off,ahead"], metavar="KIND-LENGTHS[:WAY,...]")
    parser.add_argument("--steps", type=int, help="of each way, in place of the case's own number")
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=["ours", "trl"])
    parser.add_argument("--mode", choices=("server", "colocate"), default="server")
    parser.add_argument("--engine-memory", type=float, default=0.3, help="share of the GPU of a colocated engine")
    parser.add_argument("--server-memory", type=float, default=0.4, help="share of the GPU of each server")
    parser.add_argument("--rehearse", action="store_true", help="our side only, on a tiny model, without GPUs")
    options = parser.parse_args()
    options.results = folder_of(options.results, is_rehearsal=options.rehearse)
    num_needed = 0 if options.rehearse else 2 if options.mode == "server" else 1
    if torch.cuda.device_count() < num_needed:
        parser.error(f"not testable: needs {num_needed} GPUs, has {torch.cuda.device_count()}")
    return options


if __name__ == "__main__":
    main()
