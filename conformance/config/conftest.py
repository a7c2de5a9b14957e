"""A tree of required keys, and how to lay dotted keys over it."""

import pytest

from rollmatch.config import make
from rollmatch.config.layers import merge, parse_overrides
from rollmatch.errors import ErrorList

REQUIRED = {
    "model": {"model": "models/tiny"},
    "custom": {"trainer_variant": "rollout_matching_sft", "train_jsonl": "train.jsonl", "val_jsonl": "val.jsonl"},
    "global_max_length": 1024,
    "training": {"output_dir": "runs/one"},
}


@pytest.fixture
def required():
    return REQUIRED


@pytest.fixture
def make_with():
    """Required keys and ``a.b=value`` over them -> RunConfig; ``~`` stands for custom.extra.rollout_matching."""

    def make_config(*overrides):
        full = [override.replace("~.", "custom.extra.rollout_matching.", 1) for override in overrides]
        return make(merge(REQUIRED, parse_overrides(full)))

    return make_config


@pytest.fixture
def problems_with(make_with):
    """The same for what is refused -> [(code, key)], ``~`` again for the long section."""

    def list_problems(*overrides):
        with pytest.raises(ErrorList) as caught:
            make_with(*overrides)
        pairs = [
            (error.code, error.key.replace("custom.extra.rollout_matching.", "~.")) for error in caught.value.errors
        ]
        assert all(error.problem and error.remedy for error in caught.value.errors)
        return pairs

    return list_problems
