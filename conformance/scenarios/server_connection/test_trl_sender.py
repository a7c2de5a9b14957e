"""What older dialects need to get, and that only texts are read from their store."""

from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore
from vllm.distributed.utils import StatelessProcessGroup

from conformance.doubles.instance import free_port
from conformance.doubles.refusals import refused
from conformance.judge.servers.bounded import in_thread
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.session import DIALECTS, ClientSettings, RolloutServer
from rollmatch.dialects.swift.sender import ADAPTER_ROUTE, named_parts, peft_config, without_effect
from rollmatch.dialects.trl.sender import TrlSender
from rollmatch.rollout.weight_sender import make_sender
from rollmatch.weights.gloo import open_gloo
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.named_weights import Adapter
from rollmatch.weights.plan import Merge
from rollmatch.weights.stateless import StatelessGroup

MEETING = Rendezvous(host="127.0.0.1", port=1, client="learner", timeout_s=1, join_timeout_s=1)


def servers_of(*dialects):
    servers = [RolloutServer(f"http://h:{place}", ClientSettings(timeout_s=5)) for place, _ in enumerate(dialects, 1)]
    for server, dialect in zip(servers, dialects, strict=True):
        server.dialect = DIALECTS[dialect](server.base_url)
    return servers


def test_a_store_that_waits_for_its_workers_becomes_ready():
    """ms-swift's and TRL's servers hold such a one: vLLM's ``StatelessProcessGroup`` counts those who enter."""
    port, limit = free_port(), timedelta(seconds=10)

    def hold():
        store = TCPStore("127.0.0.1", port, 2, True, limit)
        return open_gloo(PrefixStore("gloo", store), address_of(port, rank=0))

    held = in_thread(hold)
    group = StatelessGroup(address_of(port, rank=1))
    assert held.result(timeout=10).size() == group.address.world_size == 2


@pytest.mark.scenario(
    "server-connection/a-server-that-joins-by-nccl-is-refused-at-once",
    clauses=["server-connection/reaching-and-generating-have-timeouts-of-their-own#7"],
)
def test_a_server_with_a_gpu_is_refused_before_the_time_limit():
    """What vLLM's ``PyNcclCommunicator`` does on rank 0 before it waits for the others on its GPU."""
    port = free_port()
    held = in_thread(lambda: StatelessProcessGroup.create("127.0.0.1", port, 0, 2, store_timeout=60))
    joining = in_thread(lambda: StatelessGroup(address_of(port, rank=1, join_timeout_s=60)))
    held.result(timeout=20).broadcast_obj("id", 0)
    with refused("transports-differ", f"group_port {port}", problem="joins by NCCL"):
        joining.result(timeout=20)


def address_of(port, *, rank, join_timeout_s=5):
    times = {"timeout_s": 5, "join_timeout_s": join_timeout_s}
    return GroupAddress(host="127.0.0.1", port=port, rank=rank, world_size=2, **times)


def test_the_dialect_decides_the_way():
    assert isinstance(make_sender(servers_of("native", "native"), [MEETING] * 2, stage=True), NativeSender)
    assert isinstance(make_sender(servers_of("swift", "swift"), [MEETING] * 2, stage=False), TrlSender)
    assert isinstance(make_sender(servers_of("trl"), [MEETING], stage=False), TrlSender)


@pytest.mark.parametrize("dialect", ["swift", "trl", "vllm"])
def test_a_server_that_loads_weights_as_they_come_stages_none(dialect):
    with refused("staging-unavailable", "http://h:1", remedy="sync.stage"):
        make_sender(servers_of(dialect, dialect), [MEETING] * 2, stage=True)


def test_servers_of_two_dialects_are_refused():
    with refused("dialects-mixed", "http://h:1") as caught:
        make_sender(servers_of("native", "swift"), [MEETING] * 2, stage=False)
    assert caught.value.remedy


def answering(dialect, *, routes, enable_lora=True):
    (server,) = servers_of(dialect)
    server.routes = dict.fromkeys(routes, "")
    server.control = lambda route, *_, **__: {"enable_lora": enable_lora}
    return server


@pytest.mark.parametrize(
    ("dialect", "routes", "enable_lora"),
    [("swift", (), True), ("swift", (ADAPTER_ROUTE,), False), ("trl", (ADAPTER_ROUTE,), True)],
)
def test_a_server_without_a_route_for_it_gets_no_adapter_alone(dialect, routes, enable_lora):
    server = answering(dialect, routes=routes, enable_lora=enable_lora)
    with refused("adapter-unproven"):
        TrlSender([server], [MEETING]).send_adapter("adapter", version=1)


def adapter_with(*ranks, scaling=2.0, magnitude=None):
    tensors, merges = [], []
    for place, rank in enumerate(ranks):
        name = f"layers.{place}.q_proj"
        parts = {"lora_a": (f"{name}.lora_A.weight", (rank, 4)), "lora_b": (f"{name}.lora_B.weight", (6, rank))}
        tensors += [(part, torch.ones(shape)) for part, shape in parts.values()]
        names = {role: part for role, (part, _) in parts.items()}
        merges.append(Merge(name=f"{name}.weight", scaling=scaling, magnitude=magnitude, **names))
    return Adapter(tensors=tuple(tensors), merges=tuple(merges), merged=(), base=())


def test_an_adapter_has_peft_s_names_and_its_scaling_in_b():
    adapter = adapter_with(2)
    assert peft_config(adapter) | {"peft_type": "LORA"} == {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    lora_a, lora_b = named_parts(adapter)
    assert lora_a[0] == "base_model.model.layers.0.q_proj.lora_A.weight"
    assert lora_b[0] == "base_model.model.layers.0.q_proj.lora_B.weight"
    assert (lora_a[1] == 1).all()
    assert (lora_b[1] == 2).all()


def test_adapters_of_several_ranks_travel_as_one_of_the_largest():
    """The protocol names one rank; zeros change no product."""
    adapter = adapter_with(2, 4)
    assert peft_config(adapter)["r"] == 4
    tensors = dict(adapter.tensors)
    parts = [tensor for _, tensor in named_parts(adapter)]
    for merge, lora_a, lora_b in zip(adapter.merges, parts[::2], parts[1::2], strict=True):
        assert (len(lora_a), lora_b.shape[1]) == (4, 4)
        assert torch.equal(lora_b @ lora_a, 2.0 * tensors[merge.lora_b] @ tensors[merge.lora_a])


def test_an_adapter_that_undoes_another_names_its_layers_and_changes_nothing():
    blank = without_effect(adapter_with(2, 4))
    assert peft_config(blank) == peft_config(adapter_with(2, 4)) | {"r": 1, "lora_alpha": 1}
    parts = dict(named_parts(blank))
    assert [tuple(part.shape) for part in parts.values()] == [(1, 4), (6, 1), (1, 4), (6, 1)]
    assert not any(part.any() for part in parts.values())


def test_an_adapter_that_vllm_cannot_apply_is_not_sent():
    sender = TrlSender([answering("swift", routes=(ADAPTER_ROUTE,))], [MEETING])
    with refused("adapter-incomplete", "tuner.use_dora"):
        sender.send_adapter(adapter_with(2, magnitude="m"), version=1)
