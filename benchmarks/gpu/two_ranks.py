"""Training of a 4B shape by two ranks beside one rank: tokens that are learnt in a second.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.two_ranks --kind full

Full fine-tuning by FSDP2; LoRA by DDP, too. GRPO with a colocated engine per rank; a rank has the same samples a step
in all runs, so that two ranks learn twice as many. Only the phase *learn* is counted, gradients and optimizer step
included; the first step, which compiles, is not. ``--rehearse`` takes a tiny model and gloo, without GPUs.
"""

import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.grpo_sides import VLLM, our_command, our_config, our_run
from benchmarks.gpu.grpo_step import FULL, LENGTHS, TINY
from benchmarks.gpu.random_qwen3 import SMALL_MODEL, make_model
from benchmarks.gpu.report import Report, folder_of, parser_of

BAR = 1.8
FILES = {"full": "two_ranks", "lora": "two_ranks-lora"}
RUNS = {
    "full": {"one rank": (1, "ddp"), "two ranks, fsdp2": (2, "fsdp2")},
    "lora": {"one rank": (1, "ddp"), "two ranks, ddp": (2, "ddp"), "two ranks, fsdp2": (2, "fsdp2")},
}
"""Number of ranks and strategy."""


def measure(options, folder, model):
    """(name, samples of the first rank) of one run after the other."""
    scale = TINY if options.rehearse else FULL | LENGTHS["even"]
    config = our_config(folder, model, scale | {"num_prompts": 2 * scale["num_prompts"]}, lora=options.kind == "lora")
    passes = scale["num_prompts"] * scale["num_generations"] // scale["micro_batch"]
    fields = {"training.gradient_accumulation_steps": passes, f"{VLLM}.mode": "colocate"}
    fields |= {} if options.rehearse else {f"{VLLM}.gpu_memory_utilization": options.engine_memory}
    for name, (num_ranks, strategy) in RUNS[options.kind].items():
        if num_ranks > 1 and strategy not in options.strategies:
            continue
        out = folder / f"{num_ranks}-{strategy}"
        own = {"training.output_dir": out, "training.strategy": strategy}
        gpus = "" if options.rehearse else ",".join(options.gpus[:num_ranks])
        command = our_command("train", config, fields | own, gpus=gpus)
        if options.rehearse and num_ranks > 1:
            command[1:3] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "rollmatch"]
        yield name, our_run(command, out, out.with_suffix(".txt")) | {"num_ranks": num_ranks}


def rate(run):
    """Tokens a second, of the median step."""
    return statistics.median(step["learn_tokens"] / step["learn"] for step in run["steps"][1:])


def main():
    options = parse()
    report = Report(folder_of(options.results, is_rehearsal=options.rehearse) / f"{FILES[options.kind]}.json")
    with tempfile.TemporaryDirectory() as name:
        model = SMALL_MODEL if options.rehearse else options.model
        if not model.exists():
            make_model(model)
        found = {}
        for run, samples in measure(options, Path(name), model):
            found[run] = samples
            rates = {name: rate(one) for name, one in found.items()}
            ratios = {name: one / rates["one rank"] for name, one in rates.items()}
            report.write(runs=found, tokens_per_s=rates, ratios=ratios, bar=BAR)
            report.say(f"{rates}, {ratios} (bar {BAR})")
    report.end()


def parse():
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir(), "grpo-step-model-even"))
    parser.add_argument("--kind", choices=tuple(RUNS), default="full")
    parser.add_argument(
        "--strategies", nargs="+", choices=("ddp", "fsdp2"), default=["ddp", "fsdp2"], help="of two ranks"
    )
    parser.add_argument("--gpus", nargs=2, default=["0", "1"])
    parser.add_argument("--engine-memory", type=float, default=0.18, help="share of the GPU of an engine")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, without GPUs")
    options = parser.parse_args()
    if not options.rehearse and torch.cuda.device_count() < 2:
        parser.error(f"not testable: needs 2 GPUs, has {torch.cuda.device_count()}")
    return options


if __name__ == "__main__":
    main()
