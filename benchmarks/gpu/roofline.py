"""How near this machine's limits a GRPO step of a 4B shape comes: floor, measured, share, part by part.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.roofline

One GPU generates and learns in turn (9 minutes); with two, one serves and one learns. LoRA r = 16, 16 prompts of 90
tokens x 8 completions of 512, random weights. Floors: decoding moves weights, keys and values once a step at the
memory's nominal rate; learning multiplies at the rate of a large product on this GPU, measured beside it; a sync moves
the weights once over NVLink. Parts that need a second GPU say so. The part ``small`` (not run unless it is named, 4
minutes) is a model of 135M shape with responses of at most 48 tokens: a step's phases, and what of them is fixed cost.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu import decode
from benchmarks.gpu.random_qwen3 import SHAPE, SHAPE_135M, make_model, shaped
from benchmarks.gpu.report import Report, parser_of

MEMORY_RATES = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second, nominal, by a part of the GPU's name."""
LINK_RATE = 450e9
"""Bytes a second of NVLink in one direction, nominal."""
PARTS = ("decode", "learn", "small")
BARS = {
    "decoding, learning / plain": 1.03,
    "decoding, learning / own": 0.97,
    "learning, LoRA": 0.60,
    "colocated step, s": 5.0,
    "ahead, s": 2.8,
    "sync, ms": 40,
    "first step, cold cache, s": 30,
    "first step, warm cache, s": 8,
    "135M: fixed costs of a step, ms": 60,
}


def decode_floor_ms():
    """Of one step at the middle of a response. None for a GPU whose rate is not known here."""
    rate = next((rate for name, rate in MEMORY_RATES.items() if name in torch.cuda.get_device_name()), None)
    load, each = decode.LOAD, 2 * 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    held = load.num_requests * (load.prompt_len + load.response_len / 2) * each
    return None if rate is None else (weight_bytes() + held) / rate * 1000


def weight_bytes():
    """In bfloat16."""
    return 2 * sum(parameter.numel() for parameter in shaped().parameters())


class Table:
    """Rows as they are measured."""

    def __init__(self, report):
        self.report, self.rows = report, []

    def add(self, name, measured, *, floor=None, bar=None):
        """``measured``: None where a second GPU is needed."""
        share = floor / measured if floor and measured else None
        self.rows.append({"part": name, "floor": floor, "measured": measured, "share": share, "bar": bar})
        self.report.write(rows=self.rows)
        shown = "needs a second GPU" if measured is None else f"{measured:.3g}"
        self.report.say(f"{name}: {shown}, floor {_short(floor)}, share {_short(share)}, bar {_short(bar)}")

    def lines(self):
        """As Markdown."""
        yield "| part | floor | measured | share | bar |"
        yield "|---|---|---|---|---|"
        for row in self.rows:
            cells = (row["floor"], row["measured"], row["share"], row["bar"])
            yield f"| {row['part']} | {' | '.join(map(_short, cells))} |"


def _short(value):
    return "" if value is None else f"{value:.3g}"


def add_decode(table, model, folder, say):
    """Rows of decoding."""
    samples, floor = decode.measure(model, folder, rounds=3, say=say), decode_floor_ms()
    table.report.write(decode_ms=samples)
    for way, values in samples.items():
        table.add(f"decoding, {way}, ms a step", statistics.median(values), floor=floor)
    for name, ratio in decode.ratios(samples).items():
        table.add(f"decoding, {name}", ratio, bar=BARS[f"decoding, {name}"])


def add_learning(table, model, folder):
    """Rows of whole steps, from ``grpo_step``: a run that compiles, and one that finds the cache."""
    two = torch.cuda.device_count() > 1
    mode, ways = ("server", "off,ahead") if two else ("colocate", "off")
    cold = _grpo_step(folder / "cold", model, mode, ways, steps=4)
    steps = cold["samples"]["off"]["steps"]
    phases = cold["phase_s"]["off"]
    learn, step_s = phases["learn"], phases["step_s"]
    share = statistics.median(cold["learn_share"]["off"])
    table.report.write(grpo_step=cold)
    table.add("learning, LoRA, s", learn, floor=share * learn)
    table.add("learning, LoRA, share of the matrix rate", share, bar=BARS["learning, LoRA"])
    floor = share * learn + decode_floor_ms() * decode.LOAD.response_len / 1000 if decode_floor_ms() else None
    table.add(f"{'lockstep' if two else 'colocated'} step, s", step_s, floor=floor, bar=BARS["colocated step, s"])
    table.add("first step, cold cache, s", steps[0]["step_s"], bar=BARS["first step, cold cache, s"])
    if two:
        table.add(
            "sync inside the step, ms",
            phases["sync"] * 1000,
            floor=weight_bytes() / LINK_RATE * 1000,
            bar=BARS["sync, ms"],
        )
        table.add("ahead, s", cold["median_s"]["ahead"], floor=share * learn, bar=BARS["ahead, s"])
        warm = cold["samples"]["ahead"]["steps"]
    else:
        table.add("sync inside the step, ms", None, bar=BARS["sync, ms"])
        table.add("ahead, s", None, bar=BARS["ahead, s"])
        warm = _grpo_step(folder / "warm", model, mode, "off", steps=2)["samples"]["off"]["steps"]
    table.add("first step, warm cache, s", warm[0]["step_s"], bar=BARS["first step, warm cache, s"])


def add_small(table, folder):
    """Rows of a small model: what a step takes beside its engine's decoding and the products of its learning."""
    model = folder / "model-small"
    make_model(model, shape=SHAPE_135M)
    samples = decode.measure(model, folder, decode.SMALL_LOAD, rounds=3, say=table.report.say)
    engine_s = statistics.median(samples["plain"]) * decode.SMALL_LOAD.response_len / 1000
    shutil.rmtree(model)  # of a step it is one whose responses stop
    mode = "server" if torch.cuda.device_count() > 1 else "colocate"
    step = _grpo_step(folder / "small", model, mode, "tokens", steps=12)
    phases, share = step["phase_s"]["tokens"], statistics.median(step["learn_share"]["tokens"])
    table.report.write(small_decode_ms=samples, small=step)
    floors = {"rollout": engine_s, "learn": share * phases["learn"]}
    for name, seconds in phases.items():
        floor = floors.get(name, sum(floors.values()) if name == "step_s" else None)
        table.add(f"135M: {name.removesuffix('_s')}, ms", seconds * 1000, floor=floor and floor * 1000)
    fixed = (phases["step_s"] - sum(floors.values())) * 1000
    table.add(name := "135M: fixed costs of a step, ms", fixed, bar=BARS[name])


def _grpo_step(folder, model, mode, ways, *, steps):
    """What ``grpo_step`` writes of our side."""
    prefix, _, lengths = str(model).rpartition("-")
    options = {"mode": mode, "sides": "ours", "steps": steps, "cases": f"lora-{lengths}:{ways}", "model": prefix}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu.grpo_step", *words, "--results", str(folder)], check=True)
    (path,) = folder.glob("grpo_step-*.json")
    return json.loads(path.read_text())


def main():
    options = parse()
    name = torch.cuda.get_device_name().split()[1].lower()
    report = Report(options.results / f"roofline-{name}-{torch.cuda.device_count()}.json")
    table = Table(report)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model-even")
        if {"decode", "learn"} & set(options.parts):
            make_model(model)
        if "decode" in options.parts:
            add_decode(table, model, Path(folder), report.say)
        if "learn" in options.parts:
            add_learning(table, model, Path(folder))
        if "small" in options.parts:
            add_small(table, Path(folder))
    report.end("\n".join(["", *table.lines(), ""]))


def parse():
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["decode", "learn"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("not testable: needs a GPU")
    return options


if __name__ == "__main__":
    main()
