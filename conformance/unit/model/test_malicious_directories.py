"""Model directories that name code or hold other pickles than tensors: learners run nothing and say what is wrong."""

import json
import pickle
import shutil
import struct

import pytest

from conformance.doubles.digits import MODEL
from conformance.doubles.harmful_models import Harmful, replace_weights
from conformance.doubles.refusals import refused
from rollmatch.cli.main import main
from rollmatch.config import load_config
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.model.policy import load_policy
from rollmatch.model.template import Template
from rollmatch.run.policy_check import check_policy


@pytest.fixture
def model(tmp_path):
    """A directory with code that leaves ``mark`` beside it."""
    found = shutil.copytree(MODEL, tmp_path / "model")
    (found / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Evil: pass\n")
    yield found
    assert not (tmp_path / "mark").exists()


def add(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_processor_that_is_code_is_named_and_not_run(model):
    for path in model.glob("*processor*.json"):
        add(path, processor_class="Evil", auto_map={"AutoProcessor": "evil.Evil", "AutoImageProcessor": "evil.Evil"})
    with refused("processor-unreadable", "model.model"):
        Template(model, system=None, user="Look.")


def test_a_kind_of_model_that_is_code_is_named_and_not_run(model):
    add(model / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"})
    with refused("model-unreadable", "model.model"):
        load_policy(ModelConfig(model=str(model)), TunerConfig())


DAMAGED = [
    ("config.json", '{"a":' * 100_000, "model-file-missing"),
    ("generation_config.json", "[]", "model-unreadable"),
    ("generation_config.json", "{", "model-unreadable"),
    ("generation_config.json", '{"eos_token_id": "x"}', "model-unreadable"),
    ("tokenizer.json", "[" * 100_000, "tokenizer-unreadable"),
    ("model.safetensors", struct.pack("<Q", 100_000) + b"[" * 100_000, "weights-damaged"),
    ("model.safetensors.index.json", "[" * 100_000, "weights-damaged"),
    ("model.safetensors.index.json", '{"weight_map": {"a": 3, "b": "x"}}', "weights-damaged"),
    ("chat_template.jinja", "{{ messages[0].content.__class__ }}", "prompt-not-rendered"),
    ("chat_template.jinja", "{{ cycler.__init__.__globals__ }}", "prompt-not-rendered"),
    ("chat_template.jinja", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "prompt-not-rendered"),
    ("chat_template.jinja", "{{ 1 // 0 }}", "prompt-not-rendered"),
]
"""File of a model directory, what a stranger writes there, and the code that names it."""


@pytest.mark.parametrize(("name", "content", "code"), DAMAGED)
def test_a_file_that_makes_no_model_is_named(tmp_path, capsys, name, content, code):
    found = shutil.copytree("fixtures/models/arithmetic", tmp_path / "model")
    (found / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    keys = (f"model.model={found}", "custom.train_jsonl=fixtures/arithmetic/val.jsonl")  # fewer prompts
    assert main(["check", "fixtures/arithmetic/grpo.yaml", *(f"--set={key}" for key in keys)]) == 1
    assert f"[{code}] " in capsys.readouterr().err


def test_a_link_in_a_circle_is_no_model(tmp_path, capsys):
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    assert main(["check", "fixtures/arithmetic/grpo.yaml", "--set", f"model.model={circle}"]) == 1
    assert "[model-directory-missing] model.model: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("model.model", "model-directory-missing"),
        ("model.adapter", "model-directory-missing"),
        ("custom.train_jsonl", "data-file-missing"),
    ],
)
def test_a_name_longer_than_any_file_has_is_that_of_none(key, code, capsys):
    assert main(["check", "fixtures/arithmetic/grpo.yaml", "--set", f"{key}={'x' * 5000}"]) == 1
    assert f"[{code}] {key}: " in capsys.readouterr().err


@pytest.mark.parametrize("fields", [{"hidden_size": -1}, {"num_hidden_layers": "x"}, {"num_attention_heads": 0}])
def test_a_description_of_no_model_is_named(tmp_path, fields):
    found = shutil.copytree("fixtures/models/arithmetic", tmp_path / "model")
    add(found / "config.json", **fields)
    with refused("model-unreadable", "model.model"):
        check_policy(load_config("fixtures/arithmetic/grpo.yaml", [f"model.model={found}"]))


def test_pickled_weights_that_hold_more_than_tensors_are_named_and_not_run(model, tmp_path):
    replace_weights(model, "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(tmp_path / "mark"), protocol=2))
    with refused("weights-damaged", "model.model"):
        load_policy(ModelConfig(model=str(model)), TunerConfig())
