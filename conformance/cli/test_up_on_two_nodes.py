"""``rollmatch up`` with learner ranks on two nodes of Ray's own cluster: learnt is what both learn on one, bit by bit.

The engine computes one request at a time and without its cache of prefixes: a sum over other requests beside it may
differ in its last bit.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from conformance.cli.division import MATCHING, SMALL, VLLM, named
from conformance.cli.ray_nodes import own_address, ray_nodes
from conformance.cli.started import cli_command, finish, journals_of
from conformance.server.instance import free_port

pytestmark = pytest.mark.engine
STEPS = 3
ALONE = (f"{VLLM}.max_num_seqs=1", f"{VLLM}.enable_prefix_caching=false")
"""One request at a time, each computed as a whole."""


def learned(folder, address, *flags):
    """A run of two ranks: its journals, the place of each command, and weights at the end."""
    out = folder / "run"
    overrides = (
        *(*named(MATCHING, free_port(), free_port()), *SMALL, *ALONE),
        *(f"training.output_dir={out}", f"training.max_steps={STEPS}", f"training.save_steps={STEPS}"),
        "custom.extra.rollout_server.vllm_data_parallel_size=null",
    )
    command = [*cli_command("up", MATCHING, *overrides), "--address", address, "--learners", "2", *flags]
    code, output = finish(command, folder / "up.txt")
    assert code == 0, output[-3000:]
    journals = journals_of(out, num_ranks=2)
    return SimpleNamespace(
        parts={path.stem for path in (out / "logs").iterdir()},
        requests=[[(one["sample_ids"], one["seeds"]) for one in of_kind(events, "requested")] for events in journals],
        losses=[[event["loss"] for event in of_kind(events, "step")] for events in journals],
        weights=load_file(out / f"checkpoint-{STEPS}" / "model.safetensors"),
    )


def of_kind(events, kind):
    return [event for event in events if event["event"] == kind]


@pytest.mark.scenario(
    "launchers/learner-ranks-on-two-nodes", clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#16"]
)
def test_ranks_on_two_nodes_learn_what_they_learn_on_one(tmp_path_factory):
    node = {"num_cpus": 1}
    with ray_nodes(node, node, node, address=own_address()) as nodes:
        address = nodes.cluster.address
        one = learned(tmp_path_factory.mktemp("one"), address)
        two = learned(tmp_path_factory.mktemp("two"), address, "--learner-nodes", "2")
    assert one.parts == {"learner", "server-0"}
    assert two.parts == {"learner-0", "learner-1", "server-0"}
    assert two.requests == one.requests
    assert two.losses == one.losses
    assert [len(losses) for losses in two.losses] == [STEPS, STEPS]
    assert two.weights.keys() == one.weights.keys()
    assert all(torch.equal(tensor, one.weights[name]) for name, tensor in two.weights.items())
    start = load_file(MATCHING.parents[2] / "fixtures/models/digits/model.safetensors")
    assert any(not torch.equal(tensor, two.weights[name]) for name, tensor in start.items())
