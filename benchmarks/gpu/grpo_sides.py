"""Both sides of ``grpo_step``: their servers, which stay up for all cases, and their learners, which come and go."""

import json
import os
import sys
import time
from pathlib import Path

import yaml

from benchmarks.gpu.random_qwen3 import SMALL_MODEL
from conformance.doubles.digits import ROOT
from conformance.doubles.instance import free_port
from conformance.doubles.started import finish, journal_of, started

VLLM = "custom.extra.rollout_matching.vllm"
OVERLAP, SERVER = "custom.extra.rollout_matching.overlap", "custom.extra.rollout_server"
ADAPTER = {f"{VLLM}.sync.mode": "adapter", f"{VLLM}.enable_lora": True}
TOKENS = 16_384
WAYS = {
    "off": {},
    "ahead": {OVERLAP: "ahead"},
    "kept-ahead": {OVERLAP: "ahead", "custom.extra.rollout_matching.vllm.sync.in_flight": "keep"},
    "adapter": ADAPTER,
    "adapter-ahead": ADAPTER | {OVERLAP: "ahead"},
    "checkpointed": {"training.gradient_checkpointing": True},
    "tokens": {"training.tokens_per_micro_batch": TOKENS},
    "tokens-compiled": {"training.tokens_per_micro_batch": TOKENS, "training.compile_layers": True},
    "tokens-ahead": {"training.tokens_per_micro_batch": TOKENS, OVERLAP: "ahead"},
}
"""What is unlike the defaults."""
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


def longest_of(scale):
    """Room for twice the tokens of a prompt and its response."""
    return 2 * (scale["prompt_len"] + scale["response_len"])


def our_config(folder, model, scale, *, lora):
    """Path of the YAML of our side."""
    lines = "".join(json.dumps({"prompt": text, "metadata": {"sum": 0}}) + "\n" for text in prompts_of(scale))
    (folder / "train.jsonl").write_text(lines)
    reward = {"function": "fixtures.arithmetic.rewards:number", "weight": 1.0}
    fields = {
        "model": {"model": str(model), "torch_dtype": "bfloat16" if model != SMALL_MODEL else "float32"},
        "global_max_length": longest_of(scale),
        "tuner": {"train_type": "lora", "lora_rank": 16, "lora_alpha": 32} if lora else {},
        "custom": {
            "trainer_variant": "grpo",
            "train_jsonl": str(folder / "train.jsonl"),
            "val_jsonl": str(folder / "train.jsonl"),
            "prompts": {"system": ""},
            "extra": {
                "rollout_matching": {"max_new_tokens": scale["response_len"], "decoding": {"temperature": 1.0}},
                "grpo": {"num_generations": scale["num_generations"], "rewards": [reward]},
                "rollout_server": {"vllm_max_model_len": longest_of(scale)},
            },
        },
        "training": {
            "output_dir": str(folder / "run"),
            "per_device_train_batch_size": scale["micro_batch"] // scale["num_generations"],  # prompts
            "gradient_accumulation_steps": scale["num_prompts"] * scale["num_generations"] // scale["micro_batch"],
            "max_steps": scale["steps"],
            "bf16": model != SMALL_MODEL,
            "eval_scenes": 1,
            "extra_arguments": {"save_strategy": "no"},  # a checkpoint takes no part in the figures
            "report_to": "none",
        },
    }
    path = folder / "grpo.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def our_command(name, config, fields, *, gpus):
    """``rollmatch NAME``; without GPUs where none are named."""
    sets = [word for key, value in fields.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "rollmatch", name, str(config), *sets, *(["--gpus", gpus] if gpus else [])]


def our_run(command, out, log):
    """Samples of one run of ours, of the first rank's journal."""
    code, output = finish(command, log, timeout_s=500)
    assert code == 0, output[-3000:]
    events, packed = journal_of(out, "step"), journal_of(out, "packed")
    generated = [event for event in journal_of(out, "generated") if event["purpose"] == "train"]
    steps = [{"step_s": event["step_s"], **event["phase_s"]} for event in events]
    for step, answers, rows in zip(steps, generated, packed, strict=True):
        step |= {"response_tokens": answers["num_tokens"], "learn_tokens": rows["tokens"]}
    return {"steps": steps, "completions": events[-1]["segments"], "memory": events[-1].get("gpu_memory")}


class GrpoSide:
    """A server on the first GPU, for all cases, and learners on the last; colocated: learners with engines."""

    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.learner_gpu = "0" if options.mode == "colocate" else "1"
        self.server = None

    def start_server(self, stack, model, scale):
        """It ends with the stack."""
        command, log, variables = self.serve(model, scale)
        self.began, self.server = time.monotonic(), stack.enter_context(started(command, log, **variables))

    def wait_ready(self):
        """Seconds since it was started."""
        self.server.wait_healthy(self.url)
        return time.monotonic() - self.began


class OurSide(GrpoSide):
    """Each of the ways that were asked for."""

    def __init__(self, options, folder):
        super().__init__(options, folder)
        self.group_port = free_port()

    def serve(self, model, scale):
        """Command of a server, its log and variables."""
        config = our_config(self.folder, model, scale, lora=True)
        memory = {f"{SERVER}.vllm_gpu_memory_utilization": self.options.server_memory}
        command = our_command("serve", config, self._place() | memory, gpus=self._gpus("0"))
        return command, self.folder / "server.txt", {}

    def samples(self, case):
        """(way, its samples), one run after the other."""
        config = our_config(self.folder, case.model, case.scale, lora=case.kind == "lora")
        place = self._place()
        if self.options.mode == "colocate":
            place = {f"{VLLM}.mode": "colocate", f"{VLLM}.gpu_memory_utilization": self.options.engine_memory}
        for way in case.ways:
            own, out = dict(WAYS[way]), self.folder / f"{case.name}-{way}"
            if "training.tokens_per_micro_batch" in own:  # a step's prompts at once, in passes as full as they may be
                own |= {"training.per_device_train_batch_size": case.scale["num_prompts"]}
                own |= {"training.gradient_accumulation_steps": 1}
            command = our_command(
                "train", config, place | own | {"training.output_dir": out}, gpus=self._gpus(self.learner_gpu)
            )
            yield way, our_run(command, out, out.with_suffix(".txt"))

    def _gpus(self, wanted):
        return "" if self.options.rehearse else wanted

    def _place(self):
        server = {"base_url": self.url, "group_port": self.group_port}
        return {f"{VLLM}.mode": "server"} | {f"{VLLM}.server.{name}": value for name, value in server.items()}


class TrlSide(GrpoSide):
    """TRL's own server and trainer."""

    way, own = "trl", {"asynchronous": False}

    def serve(self, model, scale):
        """Command of a server, its log and variables."""
        command = [
            *(sys.executable, "-c", "import sys; from trl.cli import main; sys.exit(main())", "vllm-serve"),
            *("--model", str(model), "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--max_model_len", str(longest_of(scale))),
            *("--gpu_memory_utilization", str(self.options.server_memory)),
        ]
        return command, self.folder / "trl-server.txt", PATHS | {"CUDA_VISIBLE_DEVICES": "0"}

    def samples(self, case):
        """As ``OurSide``, of its one way."""
        name, scale = f"{case.name}-{self.way}", case.scale
        settings = scale | {
            "model": str(case.model), "url": self.url, "group_port": free_port(), "prompts": prompts_of(scale),
            "lora": case.kind == "lora", "out": str(self.folder / name), "mode": self.options.mode,
            "engine_memory": self.options.engine_memory, "samples": str(self.folder / f"{name}-samples.json"),
            **self.own,
        }  # fmt: skip
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(settings))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
        command, log = [*launch, "-m", "benchmarks.gpu.trl_step", str(path)], self.folder / f"{name}.txt"
        code, output = finish(command, log, timeout_s=500, CUDA_VISIBLE_DEVICES=self.learner_gpu, **PATHS)
        assert code == 0, output[-3000:]
        completions = scale["num_prompts"] * scale["num_generations"]
        yield self.way, json.loads(Path(settings["samples"]).read_text()) | {"completions": completions}


class AsyncTrlSide(TrlSide):
    """A stock vLLM server and TRL's AsyncGRPO, whose samples may be four steps old (its default).

    It keeps activations of all layers; those of 16 completions would not fit beside 4 B weights in float32.
    """

    way, own = "trl-async", {"asynchronous": True, "micro_batch": 8}

    def serve(self, model, scale):
        """As ``TrlSide``."""
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--max-model-len", str(longest_of(scale))),
            *("--gpu-memory-utilization", str(self.options.server_memory)),
            *("--weight-transfer-config", json.dumps({"backend": "nccl"}), "--logprobs-mode", "processed_logprobs"),
        ]
        variables = PATHS | {"CUDA_VISIBLE_DEVICES": "0", "VLLM_SERVER_DEV_MODE": "1"}
        return command, self.folder / "trl-async-server.txt", variables
