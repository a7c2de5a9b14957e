"""Scenarios of weights to servers of the older dialects, with their own values."""

from types import SimpleNamespace

import pytest
import torch

from conformance.doubles.client_calls import MEETING
from conformance.doubles.digits import load_model
from conformance.doubles.learner_side import TEMPLATE
from conformance.doubles.refusals import refused
from rollmatch.config.training import TunerConfig
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.dialects.trl import sender as trl_sender
from rollmatch.dialects.trl.sender import TrlSender, flat_metadata
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.rollout.fence import SyncMode
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.weights.named_weights import adapter_of, named_weights
from rollmatch.weights.plan import Spec

GROUP = SimpleNamespace(device=torch.device("cpu"), close=lambda: None)


@pytest.mark.scenario(
    "request-distribution/an-update-is-sent-once",
    clauses=["request-distribution/a-broken-connection-is-tried-once-more#5"],
)
def test_an_update_is_sent_once(double):
    server = RolloutServer(double.url, ClientSettings(timeout_s=3))
    server.connect()
    sender = TrlSender([server], [MEETING])
    sender._groups = (GROUP,)
    with refused("transport-failed"):
        sender.send([("a", torch.zeros(2))], version=1)
    assert double.calls.count("/update_flattened_params") == 1


@pytest.mark.scenario(
    "server-dialects/the-trainer-is-the-last-rank",
    clauses=["server-dialects/the-trl-dialect-serves-trl-and-verifiers-trainers#4"],
)
def test_the_trainer_is_the_last_rank(monkeypatch):
    calls = []
    server = SimpleNamespace(
        dialect=SimpleNamespace(name="trl"),
        routes={},
        world_size=lambda: 2,
        control=lambda route, body=None, **_: calls.append((route, body)),
        empty_caches=lambda: None,
    )
    monkeypatch.setattr(trl_sender, "StatelessGroup", lambda address, device: calls.append(address) or GROUP)
    TrlSender([server], [MEETING]).send([], version=1)
    ((_, body),) = [call for call in calls if isinstance(call, tuple) and call[0] == "/init_communicator"]
    (address,) = [call for call in calls if not isinstance(call, tuple)]
    assert body["world_size"] == address.world_size == 3
    assert address.rank == 2


@pytest.mark.parametrize("has_route", [True, False])
def test_a_server_is_told_that_all_weights_are_there_where_it_wants_to_know(monkeypatch, has_route):
    calls = []
    server = SimpleNamespace(
        dialect=SimpleNamespace(name="trl"),
        routes={"/process_weights_after_loading"} if has_route else set(),
        control=lambda route, body=None, **_: calls.append(route),
        empty_caches=lambda: calls.append("emptied"),
    )
    sender = TrlSender([server], [MEETING])
    sender._groups = (GROUP,)
    sender.send([], version=1)
    assert calls == ["/process_weights_after_loading"] * has_route + ["emptied"]


@pytest.mark.scenario(
    "server-dialects/a-bucket-is-read-by-bytes",
    clauses=["server-dialects/the-swift-dialect-serves-ms-swift-trainers#4"],
)
def test_a_bucket_is_read_by_bytes():
    entries = flat_metadata([Spec("a", "bfloat16", (6,)), Spec("b", "float32", (2,))])
    assert [(one["start_idx"], one["end_idx"]) for one in entries] == [(0, 12), (12, 20)]


@pytest.mark.scenario(clauses=["weight-sync/adapter-sync-sends-adapters-only#3"])
def test_a_server_that_would_apply_an_adapter_itself_gets_it_merged_with_a_warning(double, caplog, monkeypatch):
    """Its engine would leave the vision tower out: adapters there are the reason not to leave merging to it."""
    policy = load_model(TunerConfig(train_type="lora", lora_rank=4, freeze_vit=False))
    adapted = [name for name, _ in adapter_of(policy).tensors]
    assert any("visual" in name for name in adapted)
    server, sent = RolloutServer(double.url, ClientSettings(timeout_s=3)), []
    server.connect()
    sender = TrlSender([server], [MEETING])
    monkeypatch.setattr(sender, "send", lambda weights, *, version: sent.extend(weights))
    backend, mode = VllmServerBackend([server], TEMPLATE, Ranks(), sender=sender), SyncMode("adapter")
    with caplog.at_level("WARNING"):
        carried = [mode.push(backend, named_weights(policy), Ranks(), version=version) for version in (1, 2)]
    assert carried == ["full", "full"]
    (warning,) = caplog.messages
    assert double.url in warning
    names = [name for name, _ in sent]
    assert names == [name for name, _ in merged_weights(policy)] * 2
    assert not set(names) & set(adapted)
    backend.close()
