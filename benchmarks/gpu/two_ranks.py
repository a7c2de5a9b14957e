"""Full fine-tuning of a 4B shape by two FSDP2 ranks beside one rank: tokens that are learnt in a second.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.two_ranks

GRPO with a colocated engine per rank; a rank has the same samples a step in both runs, so that two ranks learn twice as
many. Only the phase *learn* is counted, gradients and optimizer step included; the first step, which compiles, is not.
``--rehearse`` takes a tiny model and gloo, without GPUs.
"""

import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.four_billion import SMALL_MODEL, make_model
from benchmarks.gpu.grpo_sides import VLLM, our_command, our_config, our_run
from benchmarks.gpu.grpo_step import FULL, LENGTHS, TINY
from benchmarks.gpu.report import Report, folder_of, parser_of

BAR = 1.8
RUNS = {"one rank": ("0", "ddp"), "two ranks": ("0,1", "fsdp2")}
"""GPUs and strategy."""


def measure(options, folder, model):
    """Name -> samples of the first rank."""
    scale = TINY if options.rehearse else FULL | LENGTHS["even"]
    config = our_config(folder, model, scale | {"num_prompts": 2 * scale["num_prompts"]}, lora=False)
    passes = scale["num_prompts"] * scale["num_generations"] // scale["micro_batch"]
    fields = {"training.gradient_accumulation_steps": passes, f"{VLLM}.mode": "colocate"}
    fields |= {} if options.rehearse else {f"{VLLM}.gpu_memory_utilization": options.engine_memory}
    found = {}
    for name, (gpus, strategy) in RUNS.items():
        out = folder / strategy
        own = {"training.output_dir": out, "training.strategy": strategy}
        command = our_command("train", config, fields | own, gpus="" if options.rehearse else gpus)
        if options.rehearse and "," in gpus:
            command[1:3] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "rollmatch"]
        found[name] = our_run(command, out, out.with_suffix(".txt"))
    return found


def rate(run, num_ranks):
    """Tokens a second, of the median step."""
    return num_ranks * statistics.median(step["learn_tokens"] / step["learn"] for step in run["steps"][1:])


def main():
    options = parse()
    report = Report(folder_of(options.results, is_rehearsal=options.rehearse) / "two_ranks.json")
    with tempfile.TemporaryDirectory() as name:
        model = SMALL_MODEL if options.rehearse else options.model
        if not model.exists():
            make_model(model)
        found = measure(options, Path(name), model)
    rates = {run: rate(samples, 1 + run.startswith("two")) for run, samples in found.items()}
    report.write(runs=found, tokens_per_s=rates, ratio=rates["two ranks"] / rates["one rank"], bar=BAR)
    report.end(f"{rates}, ratio {report.written['ratio']:.2f} (bar {BAR})")


def parse():
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir(), "grpo-step-model-even"))
    parser.add_argument("--engine-memory", type=float, default=0.18, help="share of the GPU of an engine")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, without GPUs")
    options = parser.parse_args()
    if not options.rehearse and torch.cuda.device_count() < 2:
        parser.error(f"not testable: needs 2 GPUs, has {torch.cuda.device_count()}")
    return options


if __name__ == "__main__":
    main()
