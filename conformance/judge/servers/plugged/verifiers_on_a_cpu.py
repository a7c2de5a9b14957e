"""The trainer of verifiers 0.1.9 on a machine without GPUs; not one line of it is changed.

Its communicator is gloo in place of NCCL. Two things of it are set from outside: the group's port, which no argument of
its names, and ``warnings_issued``, which models have no more from transformers 5 on. Trains on additions.

python verifiers_on_a_cpu.py URL GROUP_PORT MODEL STEPS DIRECTORY
"""

import random
import sys
import zlib
from functools import partial
from urllib.parse import urlsplit

import torch
from rollmatch_cpu import stand_in_for_nccl

NUM_PROMPTS, MAX_TOKENS = 32, 4


def train(url, group_port, model, steps, directory):
    stand_in_for_nccl()
    import verifiers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from verifiers.rl.trainer import trainer as module
    from verifiers.rl.trainer.config import RLConfig

    module.VLLMClient = partial(module.VLLMClient, group_port=group_port)
    draw = random.Random(1)
    questions = [f"{draw.randrange(90)}+{draw.randrange(90)}=" for _ in range(NUM_PROMPTS)]
    data = Dataset.from_list([{"question": question, "answer": ""} for question in questions])
    place = urlsplit(url)
    config = RLConfig(
        output_dir=directory,
        use_lora=False,
        use_cpu=True,
        bf16=False,
        batch_size=8,
        micro_batch_size=4,
        rollouts_per_example=4,
        max_steps=steps,
        max_seq_len=64,
        max_tokens=MAX_TOKENS,
        learning_rate=2e-3,
        vllm_server_host=place.hostname,
        vllm_server_port=place.port,
        report_to="none",
        save_strategy="no",
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy.warnings_issued = {}
    trainer = module.RLTrainer(
        model=policy,
        env=verifiers.SingleTurnEnv(dataset=data, rubric=verifiers.Rubric(funcs=[reward])),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    return trainer


def reward(completion, **_):
    """Another one for nearly every other text."""
    return zlib.crc32(completion[-1]["content"].encode()) % 1000 / 1000


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
