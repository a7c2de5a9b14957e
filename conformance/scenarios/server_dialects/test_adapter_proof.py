"""Before training, greedy tokens show whether a server applies an adapter that is sent alone."""

import copy
from types import SimpleNamespace

import pytest
import torch

from conformance.doubles.adapted_policy import LANGUAGE, TOWER
from conformance.doubles.digits import load_model, template_of
from conformance.doubles.refusals import refused
from rollmatch.config.training import TunerConfig
from rollmatch.rollout.adapter_proof import prove_adapters
from rollmatch.rollout.hf import HfBackend


class AdapterServers:
    """Servers of which those at ``deaf`` answer 200 and keep their weights."""

    def __init__(self, model, *, deaf=()):
        self.template, self.policy_version = template_of(), 0
        self.servers = [SimpleNamespace(base_url=f"http://h:{place}") for place in range(2)]
        self.model, self.deaf, self.sent = model, deaf, []
        self.held = [copy.deepcopy(model) for _ in self.servers]

    def push_adapter(self, adapter, *, version):
        self.sent.append(version)
        layers = [one for one in self.model.modules() if hasattr(one, "lora_A")]
        self.changes = [float(one.get_delta_weight("default").detach().std() / one.weight.std()) for one in layers]
        self.held = [old if place in self.deaf else copy.deepcopy(self.model) for place, old in enumerate(self.held)]

    def generate_on(self, place, requests, decoding, *, start):
        return HfBackend(self.held[place], self.template, batch_size=4).generate(requests, decoding)


@pytest.fixture
def policy():
    return load_model(TunerConfig(train_type="lora", target_regex=LANGUAGE))


@pytest.mark.parametrize(("shares", "sent"), [((0.25, 1.0), 0.25), ((1e-6, 1.0), 1.0)])
def test_servers_that_apply_the_adapter_are_accepted_and_the_policy_stays(policy, shares, sent, monkeypatch):
    monkeypatch.setattr("rollmatch.rollout.adapter_proof._SHARES", shares)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    served = AdapterServers(policy)
    prove_adapters(served, policy)
    assert served.sent == [1]
    assert served.changes == pytest.approx([sent] * len(served.changes), rel=0.2)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())


@pytest.mark.scenario(
    "server-dialects/a-server-that-drops-the-adapter-is-found",
    clauses=[
        "server-dialects/greedy-tokens-show-that-an-adapter-is-applied#1",
        "server-dialects/greedy-tokens-show-that-an-adapter-is-applied#2",
        "server-dialects/greedy-tokens-show-that-an-adapter-is-applied#3",
    ],
)
def test_a_server_that_drops_the_adapter_is_found(policy):
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    with refused("adapter-not-applied", "http://h:1"):
        prove_adapters(AdapterServers(policy, deaf=(1,)), policy)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
    of_the_tower = load_model(TunerConfig(train_type="lora", target_regex=TOWER))
    served = AdapterServers(of_the_tower)
    with refused("adapter-not-applied", "tuner.target_regex"):
        prove_adapters(served, of_the_tower)
    assert served.sent == []
