"""An unmodified GRPO trainer of TRL on additions, with a rollout server of the trl dialect.

torchrun --standalone --nproc_per_node 1 -m conformance.gpu.trl_trainer URL GROUP_PORT DIRECTORY

After the rollout of each step it notes in ``answers.json`` what the server answers greedily; the server then has the
weights of the step before, which ``checkpoint-N`` holds, too.
"""

import json
import sys
from pathlib import Path

import requests

from conformance.doubles.digits import ROOT

MODEL = ROOT / "fixtures/models/arithmetic"
NUM_STEPS, NUM_PROMPTS, MAX_TOKENS = 4, 32, 8


def prompts():
    lines = (ROOT / "fixtures/arithmetic/train.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def greedy_answers(url):
    """Completion ids of the server, one prompt at a time."""
    bodies = [
        {"prompts": [prompt], "n": 1, "max_tokens": MAX_TOKENS, "temperature": 0.0}
        for prompt in prompts()[:NUM_PROMPTS]
    ]
    replies = [requests.post(f"{url}/generate/", json=body, timeout=60).json() for body in bodies]
    return [reply["completion_ids"][0] for reply in replies]


def train(url, group_port, directory):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    noted = []

    def reward(completions, **_):
        noted.append(greedy_answers(url))
        return [float(sum(map(ord, completion)) % 7) for completion in completions]  # rarely all alike

    config = GRPOConfig(
        output_dir=directory,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=MAX_TOKENS,
        temperature=2.0,  # completions that are all alike move no weight
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        bf16=False,
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_group_port=group_port,
        save_steps=1,
        report_to="none",
        model_init_kwargs={"dtype": "float32"},
    )
    data = Dataset.from_dict({"prompt": prompts()[:64]})
    GRPOTrainer(model=str(MODEL), args=config, reward_funcs=reward, train_dataset=data).train()
    Path(directory, "answers.json").write_text(json.dumps(noted))


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3])
