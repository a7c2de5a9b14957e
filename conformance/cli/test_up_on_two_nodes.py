"""``rollmatch up`` with learner ranks on two nodes of Ray's own cluster: learnt is what both learn on one, bit by bit.

The engine computes one request at a time and without its cache of prefixes: a sum over other requests beside it may
differ in its last bit.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from conformance.cli.division import MATCHING, SMALL, VLLM, named, typed
from conformance.cli.ray_nodes import own_address, ray_nodes
from conformance.cli.started import cli_command, finish, finish_two_ranks, journals_of, started
from conformance.server.instance import free_port

pytestmark = pytest.mark.engine
STEPS = 3
ALONE = (f"{VLLM}.max_num_seqs=1", f"{VLLM}.enable_prefix_caching=false")
"""One request at a time, each computed as a whole."""


def overrides_of(folder):
    return (
        *(*named(MATCHING, free_port(), free_port()), *SMALL, *ALONE),
        *(f"training.output_dir={folder / 'run'}", f"training.max_steps={STEPS}", f"training.save_steps={STEPS}"),
        "custom.extra.rollout_server.vllm_data_parallel_size=null",
    )


def learned_on_one_node(folder):
    """A run of two ranks, started as torchrun does, and a server."""
    overrides = overrides_of(folder)
    with started(typed("serve", MATCHING, "0", overrides), folder / "server.txt"):
        finish_two_ranks(folder, *cli_command("train", MATCHING, *overrides))
    return result_of(folder)


def learned_on_two_nodes(folder):
    """The same by one command on a cluster, which has a node for each rank and one for the server."""
    command, node = cli_command("up", MATCHING, *overrides_of(folder)), {"num_cpus": 1}
    with ray_nodes(node, node, node, address=own_address()) as nodes:
        flags = ("--address", nodes.cluster.address, "--learners", "2", "--learner-nodes", "2")
        code, output = finish([*command, *flags], folder / "up.txt")
    assert code == 0, output[-3000:]
    assert {path.stem for path in (folder / "run" / "logs").iterdir()} == {"learner-0", "learner-1", "server-0"}
    return result_of(folder)


def result_of(folder):
    """What two ranks have requested and learnt."""
    journals = journals_of(folder / "run", num_ranks=2)
    return SimpleNamespace(
        requests=[[(one["sample_ids"], one["seeds"]) for one in of_kind(events, "requested")] for events in journals],
        losses=[[event["loss"] for event in of_kind(events, "step")] for events in journals],
        weights=load_file(folder / "run" / f"checkpoint-{STEPS}" / "model.safetensors"),
    )


def of_kind(events, kind):
    return [event for event in events if event["event"] == kind]


@pytest.mark.scenario(
    "launchers/learner-ranks-on-two-nodes", clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#16"]
)
def test_ranks_on_two_nodes_learn_what_they_learn_on_one(tmp_path_factory):
    one = learned_on_one_node(tmp_path_factory.mktemp("one"))
    two = learned_on_two_nodes(tmp_path_factory.mktemp("two"))
    assert two.requests == one.requests
    assert two.losses == one.losses
    assert [len(losses) for losses in two.losses] == [STEPS, STEPS]
    assert two.weights.keys() == one.weights.keys()
    assert all(torch.equal(tensor, one.weights[name]) for name, tensor in two.weights.items())
    start = load_file(MATCHING.parents[2] / "fixtures/models/digits/model.safetensors")
    assert any(not torch.equal(tensor, two.weights[name]) for name, tensor in start.items())
