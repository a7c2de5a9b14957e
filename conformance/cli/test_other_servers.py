"""An optimizer step of our learner on TRL's own server, on text; ``test_engine_stock`` takes one on ``vllm serve``.

On a machine without GPUs the plug-ins of ``conformance/servers/plugged`` and ours let them take weights over gloo.
"""

import pytest

from conformance.cli.one_step import take_a_step
from conformance.cli.started import started
from conformance.outside_tools import trl_command
from conformance.rollout.digits import ROOT
from conformance.server.instance import free_port
from conformance.servers.known import BY_NAME

pytestmark = pytest.mark.engine

ARITHMETIC = ROOT / "fixtures/arithmetic/grpo.yaml"


@pytest.mark.trl
def test_a_step_on_text_with_trl_s_own_server(tmp_path):
    known, port = BY_NAME["trl"], free_port()
    options = {
        "model": str(ROOT / "fixtures/models/arithmetic"),
        "dtype": "float32",
        "host": "127.0.0.1",
        "port": str(port),
        "max_model_len": "64",
        "enforce_eager": "true",
    }
    learner_s = ["-u", "VLLM_ENABLE_V1_MULTIPROCESSING"]
    variables = [f"{name}={value}" for name, value in known.variables().items()]
    words = [
        "env",
        *learner_s,
        *variables,
        trl_command(),
        "vllm-serve",
        *(w for k, v in options.items() for w in (f"--{k}", v)),
    ]
    with started(words, tmp_path / "server.txt"):
        take_a_step(ARITHMETIC, f"http://127.0.0.1:{port}", tmp_path, "custom.extra.grpo.eval_temperature=0")
