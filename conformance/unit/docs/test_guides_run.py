"""The YAML of the guides runs as it is printed, with a small model and short data in place of the reader's."""

import re

import pytest
import yaml

from conformance.doubles.digits import ROOT, write_cut
from rollmatch.cli.main import main
from rollmatch.journal import read_journal

SMALL = (
    f"custom.train_jsonl={ROOT}/fixtures/digits/train.jsonl",
    f"custom.val_jsonl={ROOT}/fixtures/digits/val.jsonl",
    "custom.extra.rollout_matching.rollout_backend=hf",
    "custom.extra.rollout_matching.rollout_generate_batch_size=16",
    "training.max_steps=2",
    "training.eval_scenes=2",
    "training.bf16=false",
    "training.report_to=none",
)
"""A core without bfloat16 takes a minute for a step of it."""


def blocks():
    """Name -> YAML of the guide, by the comment at its top."""
    text = (ROOT / "docs/guides/detector.md").read_text(encoding="utf-8")
    found = re.findall(r"```yaml\n# (stage\d\.yaml)\n(.*?)```", text, re.DOTALL)
    return dict(found)


@pytest.mark.wide
@pytest.mark.parametrize("length", [4096, 600])
def test_the_stages_of_the_detector_guide_run(tmp_path, monkeypatch, capsys, length):
    """Also where a row takes one of the sixteen segments of a step."""
    monkeypatch.chdir(tmp_path)
    for name, text in blocks().items():
        (tmp_path / name).write_text(text)
    sets = [word for each in SMALL for word in ("--set", each)]
    model = ("--set", f"model.model={write_cut(tmp_path / 'model')}", "--set", f"global_max_length={length}")
    sets += ["--set", "custom.extra.rollout_matching.max_new_tokens=200"] if length < 1024 else []
    assert main(["train", "stage1.yaml", *sets, *model]) == 0
    assert main(["train", "stage2.yaml", *sets, *model[2:]]) == 0
    printed = capsys.readouterr().out
    for stage in ("stage1", "stage2"):
        config = yaml.safe_load((tmp_path / f"runs/{stage}/resolved.yaml").read_text())
        assert (config["training"]["packing"], config["training"]["per_device_train_batch_size"]) == (True, 16)
        packed = [
            event for event in read_journal(tmp_path / f"runs/{stage}/journal.jsonl") if event["event"] == "packed"
        ]
        learnt = sum(event["segments"] for event in packed)
        assert (learnt, packed[-1]["carried"]) == (32, 0)
        assert "packing: 32 segments were learnt, none were dropped" in printed
