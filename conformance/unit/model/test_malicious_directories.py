"""Model directories that name code or hold other pickles than tensors: learners run nothing and say what is wrong."""

import json
import pickle
import shutil

import pytest

from conformance.doubles.digits import MODEL
from conformance.doubles.harmful_models import Harmful, replace_weights
from conformance.doubles.refusals import refused
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.model.policy import load_policy
from rollmatch.model.template import Template


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


def test_pickled_weights_that_hold_more_than_tensors_are_named_and_not_run(model, tmp_path):
    replace_weights(model, "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(tmp_path / "mark"), protocol=2))
    with refused("weights-damaged", "model.model"):
        load_policy(ModelConfig(model=str(model)), TunerConfig())
