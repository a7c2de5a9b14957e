"""Model directories that are made to run code or to take memory: refused by name, and nothing is run."""

import json
import shutil

import pytest
import torch

from conformance.doubles.digits import MODEL
from conformance.doubles.harmful_models import Harmful, replace_weights
from conformance.doubles.instance import settings_for
from conformance.doubles.refusals import refused
from rollmatch.server.identity import load_model_identity
from rollmatch.server.replica import VllmReplica


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


def test_pickled_weights_are_no_weights(model, tmp_path):
    torch.save(Harmful(tmp_path / "mark"), replace_weights(model, "pytorch_model.bin"))
    with refused("checkpoint-missing", "model.model"):
        load_model_identity(model, dtype="float32")
    assert not (tmp_path / "mark").exists()


def test_a_link_to_another_file_is_no_weights(model):
    replace_weights(model, "model.safetensors").symlink_to("/etc/passwd")
    with refused("model-unreadable", "model.model", problem="its header has"):
        load_model_identity(model, dtype="float32")


@pytest.mark.parametrize("raw", [b"", b"\xff" * 100, b"\x02" + bytes(7) + b"[]", b"\x0b" + bytes(7) + b'{"a": {}   '])
def test_a_header_that_is_none_takes_no_memory(model, raw):
    replace_weights(model, "model.safetensors").write_bytes(raw)
    with refused("model-unreadable", "model.model"):
        load_model_identity(model, dtype="float32")


@pytest.mark.parametrize("text", ["[1", "[]", "[" * 100_000])
def test_a_configuration_that_is_none_is_named(model, text):
    (model / "config.json").write_text(text)
    with refused("model-unreadable", "model.model", problem="config.json"):
        load_model_identity(model, dtype="float32")


def test_code_that_a_configuration_names_is_not_run(model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Config"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Config: pass\n")
    with refused("engine-refuses-model", "model.model"):
        VllmReplica(settings_for(model=str(model)), index=0)
    assert not (tmp_path / "mark").exists()
