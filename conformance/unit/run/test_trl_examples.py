"""TRL's documented examples of GRPOTrainer with one changed import, on a small model and data set.

Texts are those of TRL's README, of its docstring and of docs/source/grpo_trainer.md, Apache-2.0.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from conformance.doubles.digits import ROOT
from conformance.tools.real_models import make_real_model
from rollmatch.journal import read_journal

ON_DEFAULTS = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""
WITH_ARGUMENTS = """
# train_grpo.py
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("trl-lib/tldr", split="train")

# Define the reward function, which rewards completions that are close to 20 characters
def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

training_args = GRPOConfig(output_dir="Qwen2-0.5B-GRPO", logging_steps=10)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=reward_len,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
"""
WITH_AN_ENVIRONMENT = '''
import random

from trl import GRPOConfig, GRPOTrainer

class IncrementEnv:
    # Reserved methods
    def reset(self, **kwargs) -> str | None:  # required; called at the start of each rollout
        self.counter = 0
        self.target = random.randint(1, 6)  # self-sample the task
        return f"Increment the counter by {self.target}."  # returned string becomes the prompt

    def get_reward(self) -> float:  # optional: the environment scores itself from its own state
        return float(self.counter == self.target)

    # Public methods (exposed as tools)
    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    args=GRPOConfig(max_steps=1000, chat_template_kwargs={"enable_thinking": False}),
    environment_factory=IncrementEnv,
)
trainer.train()
'''
REWARDS = """
def accuracy_reward(completions, solution, log_extra=None, **kwargs):
    return [float(each[0]["content"].strip() == right) for each, right in zip(completions, solution)]
"""
"""Stands in for TRL's, which needs a parser of mathematics."""
CONFIG = """
from dataclasses import dataclass

@dataclass
class GRPOConfig:
    output_dir: str = "trainer_output"
    logging_steps: int = 500
    max_steps: int = -1
    max_completion_length: int = 512
    chat_template_kwargs: dict | None = None
"""
"""Stands in where TRL is not installed: fields that the example sets."""


def has_trl():
    try:
        return bool(version("trl"))
    except PackageNotFoundError:
        return False


def run(folder, text, rows, *, is_replaced):
    """The example as it is printed, but for the import, and the names of model and data."""
    (folder / "data").mkdir()
    (folder / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("DeepMath-103K", "tldr"):
        text = text.replace(f'"trl-lib/{name}"', '"data"')
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen3-0.6B"):
        text = text.replace(name, "tiny")
    text = text.replace("from trl import GRPOTrainer", "from rollmatch import GRPOTrainer")
    text = text.replace(
        "from trl import GRPOConfig, GRPOTrainer", "from trl import GRPOConfig\nfrom rollmatch import GRPOTrainer"
    )
    if not (folder / "tiny").exists():
        shutil.copytree(ROOT / "fixtures/models/arithmetic", folder / "tiny")
    described = json.loads((folder / "tiny/config.json").read_text())
    (folder / "tiny/config.json").write_text(json.dumps(described | {"max_position_embeddings": 1024}))
    if is_replaced:
        (folder / "trl").mkdir()
        (folder / "trl/__init__.py").write_text(CONFIG)
        (folder / "trl/rewards.py").write_text(REWARDS)
    (folder / "train_grpo.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "train_grpo.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (journal,) = folder.glob("*/journal.jsonl")
    return list(read_journal(Path(journal)))


@pytest.mark.wide
@pytest.mark.scenario(clauses=["grpo-server-mode/grpo-trainer-takes-the-arguments-of-trl#4"])
@pytest.mark.engine
def test_the_example_of_the_readme_runs_on_defaults(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"{one} + 1 ="}], "solution": str(one + 1)} for one in (3, 17)]
    events = run(tmp_path, ON_DEFAULTS, rows, is_replaced=True)
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 6
    assert {event["segments"] for event in steps} == {8}
    assert max(event["reward"] for event in steps) > 0


@pytest.mark.engine
@pytest.mark.wide
def test_the_example_of_the_documentation_runs_by_its_arguments(tmp_path):
    text = WITH_ARGUMENTS
    if has_trl() and not torch.cuda.is_available():  # transformers refuses bf16, TRL's default, without a GPU
        text = text.replace("logging_steps=10", "logging_steps=10, bf16=False, use_cpu=True")
    events = run(tmp_path, text, [{"prompt": "3 + 1 =", "completion": "4"}], is_replaced=not has_trl())
    rewards = [event["rewards"] for event in events if event["event"] == "rewarded"]
    assert [len(group) for group in rewards] == [8] * 3
    assert max(map(max, rewards)) <= 0


@pytest.mark.engine
@pytest.mark.wide
def test_the_example_of_environments_runs(tmp_path):
    """With a tokenizer whose chat template shows tools; the tiny model calls none."""
    make_real_model("qwen3", tmp_path / "tiny")
    text = WITH_AN_ENVIRONMENT.replace("max_steps=1000", "max_steps=2, max_completion_length=16")
    if has_trl() and not torch.cuda.is_available():
        text = text.replace("max_steps=2", "max_steps=2, bf16=False, use_cpu=True")
    events = run(tmp_path, text, [], is_replaced=not has_trl())
    assert [len(event["rewards"]) for event in events if event["event"] == "rewarded"] == [8, 8]
    assert [event["num_failed"] for event in events if event["event"] == "played"] == [0, 0]
    chats = [chat for event in events if event["event"] == "episodes" for chat in event["chats"]]
    assert all(chat["messages"][0][1].startswith("Increment the counter by ") for chat in chats)
