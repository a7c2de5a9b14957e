"""A forecaster of Qwen3-8B on a cluster, without hardware."""

import pytest

from conformance.doubles.digits import ROOT
from conformance.doubles.forecasts import LARGE
from conformance.doubles.shapes import QWEN3_8B, model_directory
from rollmatch.config import load_config
from rollmatch.plan.forecast import Forecaster, Site
from rollmatch.plan.rates import load_rates
from rollmatch.plan.shape import read_shape, read_teachers
from rollmatch.plan.workload import make_workload


@pytest.fixture
def forecaster(tmp_path):
    directory = model_directory(tmp_path, QWEN3_8B)

    def make(*overrides, num_gpus=4, num_nodes=1, engines_per_server=None, gpu="H200", rates=None):
        config = load_config(str(ROOT / "fixtures/digits/3v1.yaml"), [f"model.model={directory}", *LARGE, *overrides])
        shape = read_shape(directory, dtype=config.model.torch_dtype)
        return Forecaster(
            config=config,
            shape=shape,
            teachers=read_teachers(config),
            work=make_workload(config, shape, prompt_len=1500, response_len=None),
            rates=rates or load_rates(),
            site=Site(gpu=gpu, nodes=(num_gpus,) * num_nodes, engines_per_server=engines_per_server),
        )

    return make
