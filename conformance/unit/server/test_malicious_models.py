"""Model directories that are made to run code or to take memory: refused by name, and nothing is run."""

import ast
import json
import shutil
from contextlib import nullcontext

import pytest
import torch

from conformance.doubles.digits import MODEL, ROOT
from conformance.doubles.harmful_models import Harmful, replace_weights
from conformance.doubles.instance import settings_for
from conformance.doubles.refusals import refused
from rollmatch.server.identity import load_model_identity
from rollmatch.server.images import ImageReader
from rollmatch.server.prompts import PromptMaker
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


@pytest.mark.parametrize("pattern", ["*processor*.json", "tokenizer_config.json"])
def test_code_of_a_processor_or_tokenizer_is_neither_run_nor_offered_to_be_run(model, tmp_path, pattern):
    """transformers asks, and ran it after a ``y``; where it has a tokenizer of its own, it takes that one."""
    code = dict.fromkeys(("AutoProcessor", "AutoImageProcessor"), "evil.Evil") | {"AutoTokenizer": ["evil.Evil"] * 2}
    for path in model.glob(pattern):
        described = json.loads(path.read_text()) | {"processor_class": "Evil", "auto_map": code}
        path.write_text(json.dumps(described))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Evil: pass\n")
    with refused("processor-unreadable", "model.model") if "processor" in pattern else nullcontext():
        PromptMaker(str(model), vocabulary_size=416, reader=ImageReader(()))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, "{}"], ids=["nested", "empty"])
def test_a_tokenizer_that_is_none_is_named(model, text):
    (model / "tokenizer.json").write_text(text)
    with refused("tokenizer-unreadable", "model.model"):
        PromptMaker(str(model), vocabulary_size=416, reader=ImageReader(()))


def test_nothing_reads_a_model_directory_without_refusing_its_code():
    of_the_judge = [path for path in (ROOT / "conformance/judge/servers").glob("*.py") if path.stem[:5] != "test_"]
    paths = [*(ROOT / "impl").rglob("*.py"), *of_the_judge]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    readings = [ast.unparse(call) for call in calls if ast.unparse(call.func).endswith(".from_pretrained")]
    of_transformers = [reading for reading in readings if not reading.startswith(("PeftModel.", "peft."))]
    assert len(of_transformers) > 8
    assert [reading for reading in of_transformers if "trust_remote_code=False" not in reading] == []


def test_code_that_a_configuration_names_is_not_run(model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Config"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Config: pass\n")
    with refused("engine-refuses-model", "model.model"):
        VllmReplica(settings_for(model=str(model)), index=0)
    assert not (tmp_path / "mark").exists()
