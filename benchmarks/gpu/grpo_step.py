"""A whole GRPO step of ours beside TRL's, each with its own server: one GPU generates, one learns.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.grpo_step --sides ours trl

Needs TRL 1.10 and two GPUs; with ``--mode colocate`` one, on which both sides generate and learn in turn. The model has
the shape of Qwen3-4B and random weights in bfloat16, so that nearly every response is as long as it may be: 16 prompts
of 90 tokens x 8 completions of 512. ``--lengths uneven`` gives it a stop token whose probability makes responses 300
tokens long on average, and at most 1,024; ``long`` allows 4,096. Both sides learn in micro-batches of 16 with their
defaults. ``--rehearse`` runs our side on a tiny model without GPUs. Samples of the sides are added to one JSON; ratios
are of medians without the first step, which compiles and captures. ``learn_share`` is the share of the matrix rate of
this GPU that our learning reaches, recomputation and padding not counted. TRL recomputes every layer; ours does so
with ``--checkpointed`` in a run of its own, to compare the peaks of memory.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml

from benchmarks.gpu.four_billion import SMALL_MODEL, make_model, shaped
from benchmarks.gpu.machine import describe
from benchmarks.gpu.report import RESULTS, folder_of
from conformance.cli.started import finish, is_healthy, journal_of, started
from conformance.rollout.digits import ROOT
from conformance.server.instance import free_port

FULL = {"num_prompts": 16, "num_generations": 8, "micro_batch": 16, "prompt_len": 90, "steps": 4}
TINY = {"num_prompts": 2, "num_generations": 4, "micro_batch": 4, "prompt_len": 20, "response_len": 24, "steps": 2}
LENGTHS = {
    "even": {"response_len": 512},
    "uneven": {"response_len": 1024, "mean_len": 300},
    "long": {"response_len": 4096},
}
BARS = {"even": {"off / trl": 0.5, "ahead / trl": 0.33}, "uneven": {"off / trl": 0.4}, "long": {}}
"""At most; with LoRA, a server and two GPUs."""
OVERLAPS = ("off", "stream", "ahead")
SHOWN = ("uneven", "long", "colocate")
"""Parts of a result's name that say what is not the default."""
VLLM = "custom.extra.rollout_matching.vllm"
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def prompts_of(scale):
    """Texts of ``prompt_len`` tokens, each another."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    texts = []
    for number in range(scale["num_prompts"] * scale["steps"]):
        ids = tokenizer(" ".join(str(number + place) for place in range(scale["prompt_len"])))["input_ids"]
        texts.append(tokenizer.decode(ids[: scale["prompt_len"]]))
    return texts


def our_config(folder, model, scale, *, lora):
    """Path of the YAML of our side."""
    lines = "".join(json.dumps({"prompt": text, "metadata": {"sum": 0}}) + "\n" for text in prompts_of(scale))
    (folder / "train.jsonl").write_text(lines)
    longest = 2 * (scale["prompt_len"] + scale["response_len"])
    reward = {"function": "fixtures.arithmetic.rewards:number", "weight": 1.0}
    fields = {
        "model": {"model": str(model), "torch_dtype": "bfloat16" if model != SMALL_MODEL else "float32"},
        "global_max_length": longest,
        "tuner": {"train_type": "lora", "lora_rank": 16, "lora_alpha": 32} if lora else {},
        "custom": {
            "trainer_variant": "grpo",
            "train_jsonl": str(folder / "train.jsonl"),
            "val_jsonl": str(folder / "train.jsonl"),
            "prompts": {"system": ""},
            "extra": {
                "rollout_matching": {"max_new_tokens": scale["response_len"], "decoding": {"temperature": 1.0}},
                "grpo": {"num_generations": scale["num_generations"], "rewards": [reward]},
                "rollout_server": {"vllm_max_model_len": longest},
            },
        },
        "training": {
            "output_dir": str(folder / "run"),
            "per_device_train_batch_size": scale["micro_batch"] // scale["num_generations"],  # prompts
            "gradient_accumulation_steps": scale["num_prompts"] * scale["num_generations"] // scale["micro_batch"],
            "max_steps": scale["steps"],
            "bf16": model != SMALL_MODEL,
            "eval_scenes": 1,
            "save_steps": 1000,
            "extra_arguments": {"save_only_model": True},  # the checkpoint at the end takes no part in the figures
            "report_to": "none",
        },
    }
    path = folder / "grpo.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


@contextmanager
def serving(command, url, log, **variables):
    """A server, and the seconds until it was ready."""
    began = time.monotonic()
    with started(command, log, **variables) as server:
        server.wait_until(lambda: is_healthy(url))
        yield time.monotonic() - began


class Sides:
    """Each returns samples by way."""

    def __init__(self, options, folder, model, scale):
        self.options, self.folder, self.model, self.scale = options, folder, model, scale
        self.port, self.group_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def ours(self):
        config = our_config(self.folder, self.model, self.scale, lora=self.options.kind == "lora")
        if self.options.mode == "colocate":
            fields = {f"{VLLM}.mode": "colocate", f"{VLLM}.gpu_memory_utilization": self.options.engine_memory}
            ways = {"off": {}, "checkpointed": {"training.gradient_checkpointing": True}}
            ways = ways if self.options.checkpointed else {"off": {}}
            if self.options.tokens_per_micro_batch:
                ways = {"tokens": self._by_tokens()}
            return {way: self._our_run(way, config, fields | own, gpu="0") for way, own in ways.items()}
        common = {f"{VLLM}.mode": "server", f"{VLLM}.server.base_url": self.url,
                  f"{VLLM}.server.group_port": self.group_port}  # fmt: skip
        samples = {}
        serve = self._command("serve", config, common, gpu="0")
        with serving(serve, self.url, self.folder / "server.txt") as ready_s:
            for way in self.options.overlap:
                samples[way] = self._our_run(way, config, common, gpu="1") | {"server_ready_s": ready_s}
        return samples

    def _by_tokens(self):
        """A step's prompts at once; its passes hold whole segments, as many as fit."""
        return {
            "training.tokens_per_micro_batch": self.options.tokens_per_micro_batch,
            "training.per_device_train_batch_size": self.scale["num_prompts"],
            "training.gradient_accumulation_steps": 1,
        }

    def _our_run(self, way, config, fields, *, gpu):
        out = self.folder / way
        overlap = way if way in OVERLAPS else "off"
        fields |= {"training.output_dir": out, "custom.extra.rollout_matching.overlap": overlap}
        command = self._command("train", config, fields, gpu=gpu)
        code, output = finish(command, self.folder / f"{way}.txt", timeout_s=500)
        assert code == 0, output[-3000:]
        events, packed = journal_of(out, "step"), journal_of(out, "packed")
        generated = [event for event in journal_of(out, "generated") if event["purpose"] == "train"]
        steps = [{"step_s": event["step_s"], **event["phase_s"]} for event in events]
        for step, answers, rows in zip(steps, generated, packed, strict=True):
            step |= {"response_tokens": answers["num_tokens"], "learn_tokens": rows["tokens"]}
        return {"steps": steps, "completions": events[-1]["segments"], "memory": events[-1].get("gpu_memory")}

    def _command(self, name, config, fields, *, gpu):
        sets = [word for key, value in fields.items() for word in ("--set", f"{key}={value}")]
        chosen = [] if self.options.rehearse else ["--gpus", gpu]
        return [sys.executable, "-m", "rollmatch", name, str(config), *sets, *chosen]

    def trl(self):
        settings = self.scale | {
            "model": str(self.model), "url": self.url, "group_port": self.group_port, "prompts": prompts_of(self.scale),
            "lora": self.options.kind == "lora", "out": str(self.folder / "trl"), "mode": self.options.mode,
            "engine_memory": self.options.engine_memory, "samples": str(self.folder / "trl-samples.json"),
        }  # fmt: skip
        path = self.folder / "trl.json"
        path.write_text(json.dumps(settings))
        completions = self.scale["num_prompts"] * self.scale["num_generations"]
        if self.options.mode == "colocate":
            return {"trl": self._trl_run(path, "0") | {"completions": completions}}
        longest = str(2 * (self.scale["prompt_len"] + self.scale["response_len"]))
        serve = [
            *(sys.executable, "-c", "import sys; from trl.cli import main; sys.exit(main())", "vllm-serve"),
            *("--model", str(self.model), "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--max_model_len", longest),
        ]
        with serving(serve, self.url, self.folder / "trl-server.txt", CUDA_VISIBLE_DEVICES="0", **PATHS) as ready_s:
            return {"trl": self._trl_run(path, "1") | {"server_ready_s": ready_s, "completions": completions}}

    def _trl_run(self, settings, gpu):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
        command = [*launch, "-m", "benchmarks.gpu.trl_step", str(settings)]
        code, output = finish(command, self.folder / "trl.txt", timeout_s=500, CUDA_VISIBLE_DEVICES=gpu, **PATHS)
        assert code == 0, output[-3000:]
        return json.loads(Path(json.loads(settings.read_text())["samples"]).read_text())


def ratios(samples):
    """Median seconds without the first step, and ratios of the medians per response token."""
    later = {way: measured["steps"][1:] for way, measured in samples.items()}
    middle = {way: statistics.median(step["step_s"] for step in steps) for way, steps in later.items()}
    each = {way: statistics.median(s["step_s"] / s["response_tokens"] for s in steps) for way, steps in later.items()}
    return middle, {f"{way} / trl": each[way] / each["trl"] for way in each if way != "trl" and "trl" in each}


def peaks(samples):
    """Peak GPU memory in tensors of each way's learner, a colocated engine included. Unit: GB."""
    ours = {way: measured["memory"]["peak_gb"] for way, measured in samples.items() if measured.get("memory")}
    return ours | {way: measured["peak_bytes"] / 1e9 for way, measured in samples.items() if "peak_bytes" in measured}


def matrix_rate():
    """FLOP/s of a large bfloat16 product on this GPU."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for num_products in (3, 20):  # the first ones warm up
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(num_products):
            left @ right
        torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - began)


def learn_shares(steps, kind, rate):
    """Useful FLOP/s of each step's learning by ``rate``: per weight and token 4 with frozen weights, else 6, the head
    for responses only, attention left out."""
    model = shaped()
    num_body = sum(weight.numel() for weight in model.model.layers.parameters())
    per_weight, num_head = 4 if kind == "lora" else 6, model.lm_head.weight.numel()
    works = [per_weight * (num_body * step["learn_tokens"] + num_head * step["response_tokens"]) for step in steps]
    return [work / step["learn"] / rate for work, step in zip(works, steps, strict=True)]


def main():
    options = parse()
    name = "-".join(["grpo_step", options.kind, *(part for part in (options.lengths, options.mode) if part in SHOWN)])
    name += "-tokens" if options.tokens_per_micro_batch else ""
    path = options.results / f"{name}.json"
    bars = BARS[options.lengths] if (options.kind, options.mode) == ("lora", "server") else {}
    memory = options.engine_memory if options.mode == "colocate" else None
    new = {"machine": describe(), "bars": bars, "engine_memory": memory, "samples": {}}
    measured = json.loads(path.read_text()) if path.exists() else new
    scale = TINY if options.rehearse else FULL | LENGTHS[options.lengths]
    with tempfile.TemporaryDirectory() as folder:
        model = SMALL_MODEL if options.rehearse else Path(f"{options.model}-{options.lengths}")
        if not model.exists():
            make_model(model, scale.get("mean_len"))
        for side in options.sides:
            try:
                measured["samples"] |= getattr(Sides(options, Path(folder), model, scale), side)()
            finally:
                (logs := options.results / f"logs-{name}-{side}").mkdir(parents=True, exist_ok=True)
                for log in Path(folder).glob("*.txt"):
                    shutil.copy(log, logs)
            measured["median_s"], measured["ratios"] = ratios(measured["samples"])
            measured["peak_gb"] = peaks(measured["samples"])
            if (ours := measured["samples"].get("off") or measured["samples"].get("tokens")) and not options.rehearse:
                measured["matrix_tflops"] = (rate := matrix_rate()) / 1e12
                measured["learn_share"] = learn_shares(ours["steps"][1:], options.kind, rate)
            path.write_text(json.dumps(measured, indent=1) + "\n")
    sys.stdout.write(json.dumps({name: measured[name] for name in measured if name != "samples"}, indent=1) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir(), "grpo-step-model"))
    parser.add_argument("--kind", choices=("lora", "full"), default="lora")
    parser.add_argument("--mode", choices=("server", "colocate"), default="server")
    parser.add_argument("--engine-memory", type=float, default=0.3, help="share of the GPU of a colocated engine")
    parser.add_argument("--lengths", choices=tuple(LENGTHS), default="even")
    parser.add_argument("--sides", nargs="+", choices=("ours", "trl"), default=["ours", "trl"])
    parser.add_argument("--overlap", nargs="+", choices=OVERLAPS, default=["off", "ahead"])
    parser.add_argument("--checkpointed", action="store_true", help="colocated: ours with every layer recomputed, too")
    parser.add_argument("--tokens-per-micro-batch", type=int, help="colocated: ours by this key, in place of samples")
    parser.add_argument("--rehearse", action="store_true", help="our side only, on a tiny model, without GPUs")
    options = parser.parse_args()
    options.results = folder_of(options.results, is_rehearsal=options.rehearse)
    num_needed = 0 if options.rehearse else 2 if options.mode == "server" else 1
    if torch.cuda.device_count() < num_needed:
        parser.error(f"not testable: needs {num_needed} GPUs, has {torch.cuda.device_count()}")
    return options


if __name__ == "__main__":
    main()
