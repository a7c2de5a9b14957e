"""TRL's GRPO trainer on a server of TRL's or with its colocated engine, or its AsyncGRPO on a stock vLLM server, timed
by step; the peers of ``grpo_step``.

torchrun --standalone --nproc_per_node 1 -m benchmarks.gpu.trl_step SETTINGS_JSON

The file of settings names model, prompts, sizes and where to write the samples.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """Seconds from the end of one step to the end of the next, and of those in some methods."""

    def __init__(self):
        self.steps, self.phases, self.began = [], {}, 0.0

    def on_train_begin(self, args, state, control, **_):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        now = time.perf_counter()
        self.steps.append({"step_s": now - self.began, **self.phases})
        self.began = now
        self.phases = dict.fromkeys(self.phases, 0.0)

    def watch(self, owner, name, phase):
        """Add the seconds of a method to a phase."""
        method = getattr(owner, name)

        def timed(*args, **kwargs):
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - began

        setattr(owner, name, timed)


def config_of(settings):
    return GRPOConfig(
        output_dir=settings["out"],
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=settings["num_prompts"] * settings["num_generations"] // settings["micro_batch"],
        num_generations=settings["num_generations"],
        max_completion_length=settings["response_len"],
        learning_rate=1e-5,
        bf16=True,
        gradient_checkpointing=True,
        use_vllm=True,
        vllm_mode=settings["mode"],
        vllm_server_base_url=settings["url"],  # it and the port are unused by colocate
        vllm_group_port=settings["group_port"],
        vllm_gpu_memory_utilization=settings["engine_memory"],
        vllm_max_model_length=2 * (settings["prompt_len"] + settings["response_len"]),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": "bfloat16"},
    )


def rewarded(completions, **_):
    """Any reward that differs within a group."""
    return [float(place % 2) for place in range(len(completions))]


def train(settings):
    clock = StepClock()
    prompts = [[{"role": "user", "content": text}] for text in settings["prompts"]]
    trainer = GRPOTrainer(
        model=settings["model"],
        args=config_of(settings),
        reward_funcs=rewarded,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if settings["lora"] else None,
        callbacks=[clock],
    )
    server = settings["mode"] == "server"
    clock.watch(trainer.vllm_generation.vllm_client if server else trainer.vllm_generation.llm, "generate", "rollout")
    clock.watch(trainer.vllm_generation, "sync_weights", "sync")
    trainer.train()
    lengths = [line["completions/mean_length"] for line in trainer.state.log_history if "loss" in line]
    for step, length in zip(clock.steps, lengths, strict=True):
        step["response_tokens"] = length * settings["num_prompts"] * settings["num_generations"]
    figures = {"steps": clock.steps, "peak_bytes": torch.cuda.max_memory_allocated()}
    Path(settings["samples"]).write_text(json.dumps(figures))


def train_async(settings):
    """TRL's AsyncGRPO, with as few changes as a machine without the hub allows.

    Its attention kernel is one of the hub: torch's own for packed sequences takes its place, by the same interface. Its
    tokenizer gets a chat template that TRL knows. Nothing is recomputed, as on our side.
    """
    from transformers import AutoTokenizer
    from transformers.integrations import hub_kernels
    from trl import chat_template_utils
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from benchmarks.gpu import packed_attention

    hub_kernels.is_kernels_available = lambda: True
    hub_kernels.get_kernel = lambda *_, **__: packed_attention
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.chat_template = chat_template_utils.qwen2_5_chat_template
    clock = StepClock()
    completions = settings["num_prompts"] * settings["num_generations"]
    trainer = AsyncGRPOTrainer(
        model=settings["model"],
        args=AsyncGRPOConfig(
            output_dir=settings["out"],
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["micro_batch"],
            gradient_accumulation_steps=completions // settings["micro_batch"],
            token_budget=0,  # micro-batches of so many completions
            num_generations=settings["num_generations"],
            max_completion_length=settings["response_len"],
            learning_rate=1e-5,
            bf16=True,
            gradient_checkpointing=False,
            vllm_server_base_url=settings["url"],
            save_strategy="no",
            report_to="none",
        ),
        reward_funcs=rewarded,
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": text}] for text in settings["prompts"]]}
        ),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    clock.watch(trainer, "_sync_weight", "sync")
    learn, counted = trainer.compute_loss, []

    def counting(model, inputs, *arguments, **options):
        counted.append(float(inputs["global_n_tokens"][0]))
        return learn(model, inputs, *arguments, **options)

    trainer.compute_loss = counting
    trainer.train()
    passes = completions // settings["micro_batch"]
    for place, step in enumerate(clock.steps):
        step["response_tokens"] = sum(counted[place * passes : (place + 1) * passes])
    figures = {"steps": clock.steps, "peak_bytes": torch.cuda.max_memory_allocated()}
    Path(settings["samples"]).write_text(json.dumps(figures))


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    (train_async if given["asynchronous"] else train)(given)
