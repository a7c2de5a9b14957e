"""The Python of the README runs as it is printed, with a model that is here."""

import re
import subprocess
import sys
from pathlib import Path

from rollmatch.journal import read_journal

ROOT = Path(__file__).parents[3]


def test_the_trainer_of_the_readme_learns(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for written, here in (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", str(ROOT / "fixtures/models/arithmetic")),
        ('"training.max_steps": 100', '"training.max_steps": 2, "training.per_device_train_batch_size": 1'),
        ('"rollout.max_new_tokens": 64', '"rollout": {"rollout_backend": "hf", "max_new_tokens": 16}'),
    ):
        assert written in code
        code = code.replace(written, here)
    (tmp_path / "first.py").write_text(code)
    done = subprocess.run([sys.executable, "first.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [event for event in read_journal(tmp_path / "runs/first/journal.jsonl") if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2]
