"""Weights and replies between addresses of IPv6: URL in brackets, store, gloo, both kinds of group."""

import socket
from types import SimpleNamespace

import pytest
import torch

from conformance.doubles.configs import config_with
from conformance.doubles.instance import free_port
from conformance.doubles.learner_side import rendezvous
from conformance.doubles.native_double import NativeDouble, serving
from conformance.judge.servers.bounded import in_thread
from rollmatch.config.servers import pair_servers
from rollmatch.dialects.native.group import resolve
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.dialects.trl import sender as trl_sender
from rollmatch.dialects.trl.sender import TrlSender
from rollmatch.server.port import bind_http
from rollmatch.weights.group_address import GroupAddress, bind
from rollmatch.weights.stateless import StatelessGroup

LOOPBACK = "::1"
GROUP = SimpleNamespace(device=torch.device("cpu"), close=lambda: None)


@pytest.mark.ipv6
def test_two_servers_named_by_ipv6_take_weights():
    doubles = [NativeDouble({"a": torch.zeros(3)}) for _ in range(2)]
    with serving(*doubles, host=LOOPBACK) as urls:
        named = ", ".join(f"{{base_url: '{url}', group_port: {free_port()}}}" for url in urls)
        config = config_with("~.vllm.mode=server", f"~.vllm.server.servers=[{named}]")
        addresses = pair_servers(config.custom.extra.rollout_matching.vllm.server)
        assert [address.host for address in addresses] == [LOOPBACK] * 2
        servers = [RolloutServer(address.base_url, ClientSettings(timeout_s=10)) for address in addresses]
        for server in servers:
            server.connect()
        first = addresses[0]
        sender = NativeSender(servers, rendezvous(host=resolve(first.group_host), port=first.group_port), stage=False)
        sender.send([("a", torch.ones(3))], version=1)
        sender.close()
    assert [(double.policy_version, double.served["a"].tolist()) for double in doubles] == [(1, [1.0] * 3)] * 2


@pytest.mark.ipv6
def test_a_group_of_trl_s_kind_meets_at_an_address_of_ipv6():
    port, received = free_port(), torch.zeros(2)

    def address(rank):
        return GroupAddress(host=LOOPBACK, port=port, rank=rank, world_size=2, timeout_s=5, join_timeout_s=5)

    def receive():
        StatelessGroup(address(0), listener=bind(LOOPBACK, port)).broadcast(received)

    receiving = in_thread(receive)
    StatelessGroup(address(1)).broadcast(torch.ones(2))
    receiving.result(timeout=10)
    assert received.tolist() == [1, 1]


@pytest.mark.ipv6
def test_a_server_listens_at_an_address_of_ipv6():
    with bind_http(LOOPBACK, free_port()) as listener:
        assert (listener.family, listener.getsockname()[0]) == (socket.AF_INET6, LOOPBACK)


def test_each_server_of_the_trl_dialect_is_met_at_its_own_host(monkeypatch):
    called, joined = [], []

    def server(name):
        return SimpleNamespace(
            dialect=SimpleNamespace(name="trl"),
            routes={},
            world_size=lambda: 1,
            control=lambda route, body=None, **_: called.append((name, body)) if body else None,
            empty_caches=lambda: None,
        )

    monkeypatch.setattr(trl_sender, "StatelessGroup", lambda address, device: joined.append(address) or GROUP)
    places = [("10.0.0.1", 51216), ("10.0.0.2", 51217)]
    meetings = [rendezvous(host=host, port=port) for host, port in places]
    TrlSender([server("a"), server("b")], meetings).send([], version=1)
    assert sorted((name, (body["host"], body["port"])) for name, body in called) == [*zip("ab", places, strict=True)]
    assert sorted((address.host, address.port) for address in joined) == places


def test_the_group_meets_at_the_host_of_the_url_unless_another_is_named():
    entry = "base_url: 'https://proxy:443/a', group_port: 51216"
    for word, expected in (("", "proxy"), (", group_host: 10.0.0.7", "10.0.0.7")):
        config = config_with("~.vllm.mode=server", f"~.vllm.server.servers=[{{{entry}{word}}}]")
        (address,) = pair_servers(config.custom.extra.rollout_matching.vllm.server)
        assert (address.host, address.group_host) == ("proxy", expected)
