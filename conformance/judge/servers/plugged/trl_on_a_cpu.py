"""A GRPO trainer of TRL on a machine without GPUs; not one line of it is changed.

Its communicator is gloo in place of NCCL, and the learner has no GPU whose id it could send. Trains on additions.

python trl_on_a_cpu.py URL GROUP_PORT MODEL STEPS DIRECTORY
"""

import random
import sys
import zlib
from types import SimpleNamespace

import torch
from rollmatch_cpu import stand_in_for_nccl

NUM_PROMPTS, MAX_TOKENS = 64, 4


def train(url, group_port, model, steps, directory):
    stand_in_for_nccl()
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="none")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=MAX_TOKENS,
        temperature=2.0,  # a group of equal completions teaches nothing, and the next update would repeat the weights
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_group_port=group_port,
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": "float32"},
    )
    draw = random.Random(1)
    data = Dataset.from_dict({"prompt": [f"{draw.randrange(90)}+{draw.randrange(90)}=" for _ in range(NUM_PROMPTS)]})
    GRPOTrainer(model=model, args=config, reward_funcs=reward, train_dataset=data).train()


def reward(completions, **_):
    """Another one for nearly every other text."""
    return [zlib.crc32(completion.encode()) % 1000 / 1000 for completion in completions]


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
