"""The guide of agents runs as it is printed, with another real model and a short run in place of the reader's."""

import re
import subprocess
import sys

import pytest

from conformance.doubles.digits import ROOT
from conformance.tools.tokenizers import fetch_tokenizer
from rollmatch.journal import read_journal

HERE = {
    "show_tools: template": "show_tools: text",
    "max_new_tokens: 256": "max_new_tokens: 24, rollout_backend: hf",
    "max_steps: 100": "max_steps: 1, per_device_train_batch_size: 1, bf16: false, report_to: none",
    "num_generations: 8": "num_generations: 2",
    "processes: 4": "processes: 1",
}


def block(language, first=""):
    text = (ROOT / "docs/guides/agents.md").read_text(encoding="utf-8")
    [found] = re.findall(rf"```{language}\n({first}.*?)```", text, re.DOTALL)
    return found


@pytest.mark.wide
def test_from_a_tool_function_to_a_trained_agent(tmp_path):
    config = block("yaml").replace("Qwen/Qwen3-0.6B", str(fetch_tokenizer("smollm2")))
    for written, here in HERE.items():
        assert written in config
        config = config.replace(written, here)
    (tmp_path / "my_tools.py").write_text(block("python"))
    (tmp_path / "train.jsonl").write_text(block("json"))
    (tmp_path / "agent.yaml").write_text(config)
    for command in ("check", "train"):
        words = [sys.executable, "-m", "rollmatch", command, "agent.yaml"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    events = list(read_journal(tmp_path / "runs/agent/journal.jsonl"))
    assert [event["step"] for event in events if event["event"] == "step"] == [1]
    assert {event["num_failed"] for event in events if event["event"] == "played"} == {0}


def test_the_reward_and_the_tool_of_the_guide(tmp_path, monkeypatch):
    names = {}
    exec(block("python"), names)
    assert names["calculate"](412, "*", 287) == 118244
