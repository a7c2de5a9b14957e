"""Two ranks whose weights DeepSpeed has split send the same weights as a process that has them all, adapters merged."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conformance.outside_tools import python_of
from conformance.rollout.digits import load_model
from conformance.server.instance import free_port
from conformance.weights.native_double import NativeDouble, serving
from rollmatch.model.checkpoint import merged_weights

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("zero_ranks.py")
PATIENCE_S = 240

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module", params=[2, 3])
def run(request, tmp_path_factory):
    """What the server holds after the last sync, the folder with what each rank saw, and the stage of ZeRO."""
    folder = tmp_path_factory.mktemp("zero")
    double = NativeDouble({name: weight.detach() * 0 for name, weight in merged_weights(load_model())})
    with serving(double) as (url,):
        script = [str(SCRIPT), str(request.param), url, str(free_port()), str(folder)]
        torchrun = [python_of("deepspeed"), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"PYTHONPATH": f"{ROOT / 'impl'}:{ROOT}"}
        done = subprocess.run(
            [*torchrun, *script], env=environment, cwd=ROOT, timeout=PATIENCE_S, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return double, folder, request.param


def weights(folder, name):
    return [load_file(folder / f"{name}-rank{rank}.safetensors") for rank in (0, 1)]


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_gathered_weights_are_the_plain_ones_bit_for_bit(run):
    _, folder, stage = run
    plain, gathered = weights(folder, "plain0"), weights(folder, "gathered0")
    assert all(equal(*pair) for pair in zip(plain, gathered, strict=True))
    assert {(folder / f"split0-rank{rank}").read_text() for rank in (0, 1)} == {str(stage == 3)}


def test_weights_of_a_step_are_gathered_alike_and_served(run):
    double, folder, _ = run
    before, expected = weights(folder, "gathered0")[0], weights(folder, "plain1")[0]
    first, second = weights(folder, "gathered1")
    assert equal(first, second)
    moved = [name for name in first if not torch.equal(first[name], before[name])]
    assert len(moved) > 20
    assert all(torch.allclose(first[name], expected[name], atol=1e-6) for name in first)
    assert double.policy_version == 2
    assert equal(double.served, first)
