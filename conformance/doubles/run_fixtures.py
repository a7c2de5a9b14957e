"""A directory with a configuration that has no fault; a run of two ranks to compare others with."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from PIL import Image

from conformance.doubles.configs import VALID

ROOT = Path(__file__).parents[2]
RECORD = {"images": ["a.png"], "objects": [{"desc": "a", "bbox_2d": [0, 0, 9, 9]}], "width": 8, "height": 6}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory in which ``rollmatch check run.yaml`` finds nothing wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLMATCH_TRACEBACK", raising=False)
    Image.new("L", (8, 6)).save("a.png")
    shutil.copytree(ROOT / "fixtures/models/digits", tmp_path / "tiny")
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(RECORD)}\n" * 3)
    (tmp_path / "val.jsonl").write_text(f"{json.dumps({**RECORD, 'objects': []})}\n")
    tree = VALID | {"model": {"model": "tiny"}, "training": {"output_dir": "out"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path


@pytest.fixture(scope="session")
def learned_on_one_host(tmp_path_factory):
    """A run of two ranks and one server that stays."""
    from conformance.doubles.elastic import learned  # loads torch

    return learned(tmp_path_factory.mktemp("fixed"), 1, {0: [0]})
