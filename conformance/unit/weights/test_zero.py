"""Two ranks whose weights DeepSpeed has split send the same weights as a process that has them all, adapters merged.

As a script (``STAGE URL PORT FOLDER``) it is one of the ranks: syncs at step 0, trains a step of LoRA, syncs again.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.digits import load_model
from conformance.doubles.instance import free_port
from conformance.doubles.learner_side import make_fence, roll_out
from conformance.doubles.native_double import NativeDouble, serving
from conformance.tools.outside_tools import python_of
from rollmatch.config.training import TunerConfig
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.weights.named_weights import named_weights

ROOT = Path(__file__).parents[3]
PATIENCE_S = 240
LEARNING_RATE = 0.001

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module", params=[2, 3])
def run(request, tmp_path_factory):
    """What the server holds after the last sync, the folder with what each rank saw, and the stage of ZeRO."""
    folder = tmp_path_factory.mktemp("zero")
    double = NativeDouble({name: weight.detach() * 0 for name, weight in merged_weights(load_model())})
    with serving(double) as (url,):
        script = [__file__, str(request.param), url, str(free_port()), str(folder)]
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


def make_policy():
    """With adapters that do something, the same ones on every rank."""
    torch.manual_seed(0)
    policy = load_model(TunerConfig(train_type="lora", lora_rank=2)).train()
    return perturb_adapters(policy, named="lora_B", by=0.02)


def loss_of(policy, rank):
    """Of tokens that every rank has others of."""
    ids = torch.arange(20, 36)[None] + rank
    return policy(input_ids=ids, labels=ids).loss


def learning(policy):
    return [weight for weight in policy.parameters() if weight.requires_grad]


def train_alone(policy, num_ranks):
    """What all ranks' step does to the policy."""
    optimizer = torch.optim.SGD(learning(policy), lr=LEARNING_RATE)
    (sum(loss_of(policy, rank) for rank in range(num_ranks)) / num_ranks).backward()
    optimizer.step()


def make_engine(policy, stage, num_ranks):
    import deepspeed

    config = {
        "train_batch_size": num_ranks,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(learning(policy), lr=LEARNING_RATE)
    return deepspeed.initialize(model=policy, optimizer=optimizer, config=config)[0]


def save(weights, folder, name):
    save_file({key: weight.contiguous() for key, weight in weights}, folder / f"{name}.safetensors")


def main(stage, url, port, folder):
    """Write to ``folder``, per rank, merged weights: before DeepSpeed got the model and as gathered (``0``), after the
    step as one process takes it and as gathered (``1``)."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    ranks = Ranks.from_environment()
    policy = make_policy()
    save(merged_weights(policy), folder, f"plain0-rank{ranks.rank}")
    alone = copy.deepcopy(policy)
    train_alone(alone, dist.get_world_size())
    save(merged_weights(alone), folder, f"plain1-rank{ranks.rank}")
    engine = make_engine(policy, int(stage), dist.get_world_size())
    fence = make_fence(url, int(port), folder, ranks)
    for step in (0, 1):
        if step == 1:
            engine.backward(loss_of(engine, ranks.rank))
            engine.step()
        roll_out(fence, engine, step)
        save(named_weights(engine), folder, f"gathered{step}-rank{ranks.rank}")
        (folder / f"split{step}-rank{ranks.rank}").write_text(str(named_weights(engine.module).is_sharded))
    fence.backend.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
