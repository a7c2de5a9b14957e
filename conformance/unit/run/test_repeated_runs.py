"""Runs one after the other in one process, as in a notebook or a search for settings."""

import gc

import pytest
from transformers import PreTrainedModel

from conformance.draws.compare import run, write
from conformance.draws.models import model_directory
from conformance.draws.servers import scripted
from conformance.draws.strategy import PLAIN
from conformance.oracle.defaults import G, R, T
from conformance.oracle.policy import words_of


@pytest.mark.parametrize("backend", [pytest.param("hf", marks=pytest.mark.wide), "vllm"])
def test_a_run_that_has_ended_leaves_no_model_behind(backend, tmp_path):
    keys = PLAIN | {f"{R}.rollout_backend": backend, f"{T}.max_steps": 2, f"{T}.eval_scenes": 1}
    keys |= {f"{G}.num_generations": 2}
    servers = [{}] if backend == "vllm" else []
    draw = {"family": "qwen3", "samples": [{"prompt": "1a"}, {"prompt": "2a"}], "servers": servers, "keys": keys}
    directory = model_directory("qwen3", tmp_path / "models")
    num_models, num_frozen = [], []
    for number in range(3):
        with scripted(draw, directory, words_of(directory)) as (_, named):
            write(draw, tmp_path / str(number), directory, named)
            run(draw, tmp_path / str(number))
        gc.collect()
        num_models.append(sum(isinstance(found, PreTrainedModel) for found in gc.get_objects()))
        num_frozen.append(gc.get_freeze_count())
    assert num_models[1] == num_models[2]
    assert num_frozen[1] >= num_frozen[2], "what no collector looks at grows"
