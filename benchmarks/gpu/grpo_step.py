"""A whole GRPO step of ours beside TRL's, each with its own server: one GPU generates, one learns.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.grpo_step --sides ours trl

Needs two GPUs and TRL 1.10. The model has the shape of Qwen3-4B and random weights in bfloat16, so that nearly every
response is as long as it may be: 16 prompts of 90 tokens x 8 completions of 512. Both sides learn in micro-batches of
16 with their defaults. ``--rehearse`` runs our side on a tiny model without GPUs. Samples of the sides are added to
one JSON; ratios are of medians without the first step, which compiles and captures.
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

from benchmarks.gpu.machine import describe
from conformance.cli.started import finish, is_healthy, journal_of, started
from conformance.rollout.digits import ROOT
from conformance.server.instance import free_port

SMALL_MODEL = ROOT / "fixtures/models/arithmetic"
SHAPE = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960,
    "max_window_layers": 36, "initializer_range": 0.02,
}  # fmt: skip
FULL = {"num_prompts": 16, "num_generations": 8, "micro_batch": 16, "prompt_len": 90, "response_len": 512, "steps": 4}
TINY = {"num_prompts": 2, "num_generations": 4, "micro_batch": 4, "prompt_len": 20, "response_len": 24, "steps": 2}
BARS = {"off / trl": 0.5, "ahead / trl": 0.33}
"""At most; with LoRA."""
VLLM = "custom.extra.rollout_matching.vllm"


def make_model(directory):
    """The arithmetic model's tokenizer around random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(SMALL_MODEL, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    fields = json.loads((SMALL_MODEL / "config.json").read_text()) | SHAPE
    fields["layer_types"] = ["full_attention"] * SHAPE["num_hidden_layers"]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(Qwen3Config.from_dict(fields), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    del model
    torch.cuda.empty_cache()


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
        lora = self.options.kind == "lora"
        config = our_config(self.folder, self.model, self.scale, lora=lora)
        common = {f"{VLLM}.mode": "server", f"{VLLM}.server.base_url": self.url,
                  f"{VLLM}.server.group_port": self.group_port}  # fmt: skip
        samples = {}
        serve = self._command("serve", config, common, gpu="0")
        with serving(serve, self.url, self.folder / "server.txt") as ready_s:
            for way in self.options.overlap:
                out = self.folder / way
                fields = {"training.output_dir": out, "custom.extra.rollout_matching.overlap": way}
                command = self._command("train", config, common | fields, gpu="1")
                code, output = finish(command, self.folder / f"{way}.txt")
                assert code == 0, output[-3000:]
                events = journal_of(out, "step")
                steps = [{"step_s": event["step_s"], **event["phase_s"]} for event in events]
                samples[way] = {
                    "steps": steps, "server_ready_s": ready_s, "completions": events[-1]["segments"],
                }  # fmt: skip
        return samples

    def _command(self, name, config, fields, *, gpu):
        sets = [word for key, value in fields.items() for word in ("--set", f"{key}={value}")]
        chosen = [] if self.options.rehearse else ["--gpus", gpu]
        return [sys.executable, "-m", "rollmatch", name, str(config), *sets, *chosen]

    def trl(self):
        settings = self.scale | {
            "model": str(self.model), "url": self.url, "group_port": self.group_port, "prompts": prompts_of(self.scale),
            "lora": self.options.kind == "lora", "out": str(self.folder / "trl"),
            "samples": str(self.folder / "trl-samples.json"),
        }  # fmt: skip
        path = self.folder / "trl.json"
        path.write_text(json.dumps(settings))
        longest = str(2 * (self.scale["prompt_len"] + self.scale["response_len"]))
        serve = [
            *(sys.executable, "-c", "import sys; from trl.cli import main; sys.exit(main())", "vllm-serve"),
            *("--model", str(self.model), "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--max_model_len", longest),
        ]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        server_log = self.folder / "trl-server.txt"
        with serving(serve, self.url, server_log, CUDA_VISIBLE_DEVICES="0", **paths) as ready_s:
            command = [*launch, "-m", "benchmarks.gpu.trl_step", str(path)]
            code, output = finish(command, self.folder / "trl.txt", CUDA_VISIBLE_DEVICES="1", **paths)
            assert code == 0, output[-3000:] + server_log.read_text()[-2000:]
        completions = self.scale["num_prompts"] * self.scale["num_generations"]
        told = {"server_ready_s": ready_s, "completions": completions}
        return {"trl": json.loads(Path(settings["samples"]).read_text()) | told}


def ratios(samples):
    """Medians without the first step, and ratios of them per completion; the bars are for LoRA."""
    middle = {way: statistics.median(step["step_s"] for step in told["steps"][1:]) for way, told in samples.items()}
    each = {way: seconds / samples[way]["completions"] for way, seconds in middle.items()}
    return middle, {f"{way} / trl": each[way] / each["trl"] for way in each if way != "trl" and "trl" in each}


def main():
    options = parse()
    path = options.results / f"grpo_step-{options.kind}.json"
    told = json.loads(path.read_text()) if path.exists() else {"machine": describe(), "bars": BARS, "samples": {}}
    scale = TINY if options.rehearse else FULL
    with tempfile.TemporaryDirectory() as folder:
        model = SMALL_MODEL if options.rehearse else options.model
        if not model.exists():
            make_model(model)
        for side in options.sides:
            logs = options.results / f"logs-{side}"
            try:
                told["samples"] |= getattr(Sides(options, Path(folder), model, scale), side)()
            finally:
                logs.mkdir(parents=True, exist_ok=True)
                for log in Path(folder).glob("*.txt"):
                    shutil.copy(log, logs)
            told["median_s"], told["ratios"] = ratios(told["samples"])
            path.write_text(json.dumps(told, indent=1) + "\n")
    sys.stdout.write(json.dumps({name: told[name] for name in ("median_s", "ratios")}, indent=1) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir(), "grpo-step-model"))
    parser.add_argument("--kind", choices=("lora", "full"), default="lora")
    parser.add_argument("--sides", nargs="+", choices=("ours", "trl"), default=["ours", "trl"])
    parser.add_argument("--overlap", nargs="+", choices=("off", "stream", "ahead"), default=["off", "ahead"])
    parser.add_argument("--rehearse", action="store_true", help="our side only, on a tiny model, without GPUs")
    options = parser.parse_args()
    if not options.rehearse and torch.cuda.device_count() < 2:
        parser.error(f"not testable: needs 2 GPUs, has {torch.cuda.device_count()}")
    return options


if __name__ == "__main__":
    main()
