"""Scenarios of weights on their way with their own values: real groups, servers that only pretend."""

from types import MethodType, SimpleNamespace

import pytest
import torch

from conformance.doubles.adapters import perturb_adapters
from conformance.rollout.digits import load_model
from conformance.scenarios.configs import not_refused
from conformance.weights.native_double import NativeDouble, serving
from conformance.weights.test_native_sender import free_port, names_called
from rollmatch.cli import run as run_module
from rollmatch.cli.assemble import TrainerParts
from rollmatch.config.training import TunerConfig
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.errors import RollmatchError
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.rollout.fence import SyncMode
from rollmatch.rollout.vllm_server import VllmServerBackend
from rollmatch.trainer import RolloutTrainer
from rollmatch.weights.digest import bytes_of, digest_of
from rollmatch.weights.named_weights import adapter_of, named_weights

TEMPLATE = SimpleNamespace(
    messages=lambda sample: [], banned_ids=(), vocabulary=SimpleNamespace(stop_id=9, stop_token="<|im_end|>")
)


@pytest.fixture
def attach():
    """A double -> a backend whose sender has a group with it."""
    opened = []

    def begin(double, *, client="learner", timeout_s=5):
        front = serving(double)
        (url,) = front.__enter__()
        server = RolloutServer(url, ClientSettings(timeout_s=5))
        server.connect()
        rendezvous = Rendezvous(
            host="127.0.0.1", port=free_port(), client=client, timeout_s=timeout_s, join_timeout_s=5
        )
        backend = VllmServerBackend([server], TEMPLATE, Ranks(), sender=NativeSender([server], rendezvous))
        opened.append((front, backend))
        return backend

    yield begin
    for front, backend in opened:
        backend.close()
        front.__exit__(None, None, None)


def tensors_of(value, num_tensors=2):
    return {f"layer{i}": torch.full((2, 2), float(value)) for i in range(num_tensors)}


def lora_policy(rank=8):
    return perturb_adapters(load_model(TunerConfig(train_type="lora", lora_rank=rank)), named="lora_B", by=0.05)


@pytest.mark.scenario(
    "server-dialects/a-sync-of-many-tensors-is-one-call",
    clauses=["server-dialects/the-native-dialect-carries-a-sync-in-one-message#1,2"],
)
def test_a_sync_of_399_tensors_is_one_call(attach):
    double, sent = NativeDouble(tensors_of(0, 399)), tensors_of(1, 399)
    with not_refused():
        attach(double).push(sent.items(), version=1)
    assert names_called(double) == ["communicator", "sync"]
    (body,) = [body for name, body in double.calls if name == "sync"]
    described = {(t["name"], tuple(t["shape"]), t["dtype"]) for t in body["tensors"]}
    assert described == {(name, (2, 2), "float32") for name in sent}
    assert double.digests == [digest_of(sent[t["name"]]).hex() for t in body["tensors"]]
    assert (len(double.digests), body["version"]) == (399, 1)


@pytest.mark.scenario(
    "weight-sync/a-step-writes-no-weights-to-disk", clauses=["weight-sync/weights-travel-in-memory#1"]
)
def test_two_syncs_write_no_weights_to_disk(attach, tmp_path, monkeypatch):
    for name in ("TMPDIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    double = NativeDouble(tensors_of(0))
    backend = attach(double)
    for version in (1, 2):
        backend.push(tensors_of(version).items(), version=version)
    assert double.policy_version == 2
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.scenario(
    "weight-sync/the-communicator-is-closed-after-an-error", clauses=["weight-sync/weights-travel-in-memory#4"]
)
def test_the_communicator_is_closed_after_an_error(attach, tmp_path, monkeypatch):
    double = NativeDouble(tensors_of(0))
    backend, template = attach(double), SimpleNamespace(processor=None)

    def third_step_fails(trainer, config, checkpoint):
        for version in (1, 2):
            backend.push(tensors_of(version).items(), version=version)
        raise RuntimeError("the third step")

    source = SimpleNamespace(fence=SimpleNamespace(backend=backend))
    trainer = SimpleNamespace(source=source, overlap=SimpleNamespace(prefetch=None))
    trainer.close = MethodType(RolloutTrainer.close, trainer)
    for name, made in {
        "make_arguments": None,
        "read_policy": None,
        "prepare_layers": None,
        "make_template": template,
        "make_parts": TrainerParts(source, None, None),
        "describe": {},
        "_announce": None,
        "RolloutTrainer": trainer,
    }.items():
        monkeypatch.setattr(run_module, name, lambda *_, made=made, **__: made)
    monkeypatch.setattr(run_module, "_train", third_step_fails)
    training = SimpleNamespace(output_dir=str(tmp_path), eval_scenes=1)
    config = SimpleNamespace(training=training, model=None, tuner=None)
    with pytest.raises(RuntimeError, match="third step"):
        run_module.run(config, [], [], config_path="run.yaml", checkpoint=None)
    assert [name for name in names_called(double) if name.startswith("sync")] == ["sync", "sync_again"]
    assert [name for name, _ in double.calls][-1] == "close_communicator"
    assert (double.group, double.client) == (None, None)
    with not_refused():
        attach(double, client="another").push(tensors_of(3).items(), version=3)
    assert double.policy_version == 3


@pytest.mark.scenario("weight-sync/a-failed-sync-leaves-the-adapter-unmerged")
def test_a_failed_sync_leaves_the_adapter_unmerged(attach):
    policy = lora_policy()
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    double = NativeDouble(dict(merged_weights(policy)))
    double.faults = {"stall": 0.1}
    backend = attach(double, timeout_s=1)
    with pytest.raises(RollmatchError) as caught:
        backend.push(named_weights(policy), version=1)
    assert caught.value.code == "transfer-failed"
    assert double.policy_version == 0
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())


class Merging(NativeDouble):
    """Takes adapters as a server of ours does; ``forgets`` answers 200 and keeps its old weights."""

    forgets = False

    def commit(self, body):
        if set(self.staged or ()) == set(self.served):
            return super().commit(body)
        told = self.policy_version if self.forgets else self.version
        self.policy_version, self.staged = told, None
        return {"policy_version": told, "committed": True}


@pytest.mark.scenario(
    "weight-sync/only-adapter-bytes-travel", clauses=["weight-sync/adapter-sync-sends-adapters-only#1"]
)
def test_only_adapter_bytes_travel(attach):
    policy = lora_policy(8)
    double, adapter = Merging(dict(merged_weights(policy))), adapter_of(policy)
    attach(double).push_adapter(adapter, version=1)
    (body,) = [body for name, body in double.calls if name == "sync"]
    lora = [weight for name, weight in policy.named_parameters() if "lora_" in name]
    sizes = [4 * torch.Size(tensor["shape"]).numel() for tensor in body["tensors"]]
    assert sum(sizes) == sum(len(bytes_of(weight.detach())) for weight in lora)
    assert all("lora_" in tensor["name"] for tensor in body["tensors"])
    own = dict(merged_weights(policy))
    merged = body["adapter"]["merged_digests"]
    assert merged == {merge["name"]: digest_of(own[merge["name"]]).hex() for merge in body["adapter"]["merges"]}


@pytest.mark.scenario(
    "weight-sync/a-silent-failure-is-seen", clauses=["weight-sync/a-failed-adapter-sync-falls-back-once-and-for-all#6"]
)
def test_a_silent_failure_is_seen(attach):
    policy = lora_policy()
    double = Merging(dict(merged_weights(policy)))
    double.forgets = True
    assert SyncMode("adapter").push(attach(double), named_weights(policy), version=1) == "full"
    assert names_called(double).count("sync") == 2
    assert double.policy_version == 1


@pytest.mark.scenario(
    "weight-sync/a-flipped-bit-is-found", clauses=["weight-sync/every-sync-has-a-version-and-is-proven#2,3"]
)
def test_a_flipped_bit_is_found(attach):
    weights = {"lm_head.weight": torch.ones(4, 2), "norm.weight": torch.ones(2)}
    double = NativeDouble({name: weight * 0 for name, weight in weights.items()})
    double.faults = {"flip": "lm_head.weight"}
    with pytest.raises(RollmatchError) as caught:
        attach(double).push(weights.items(), version=1)
    assert (caught.value.code, caught.value.key) == ("digest-mismatch", "lm_head.weight")
    assert double.policy_version == 0


@pytest.mark.scenario("weight-sync/a-sync-of-unchanged-weights-changes-nothing")
def test_a_sync_of_unchanged_weights_changes_nothing(attach):
    double = NativeDouble(tensors_of(1))
    backend, before = attach(double), dict(double.served)
    with not_refused():
        backend.push(tensors_of(1).items(), version=backend.policy_version + 1)
    assert all(torch.equal(double.served[name], weight) for name, weight in before.items())
    assert double.policy_version == 1
