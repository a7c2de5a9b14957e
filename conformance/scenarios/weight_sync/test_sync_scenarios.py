"""Scenarios of weights on their way with their own values: real groups, servers that only pretend."""

import pytest
import torch
from transformers import TrainerCallback

import rollmatch
from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.digits import load_model
from conformance.doubles.native_double import NativeDouble, names_called
from conformance.doubles.refusals import refused
from conformance.draws.compare import write
from conformance.draws.models import model_directory
from conformance.draws.servers import scripted
from conformance.draws.strategy import PLAIN
from conformance.oracle.defaults import R, T
from conformance.oracle.policy import words_of
from rollmatch.config.training import TunerConfig
from rollmatch.model.checkpoint import merged_weights, model_tensors
from rollmatch.ranks import Ranks
from rollmatch.rollout.fence import SyncMode
from rollmatch.weights.digest import bytes_of, digest_of
from rollmatch.weights.named_weights import adapter_of, named_weights
from rollmatch.weights.plan import Merge
from rollmatch.weights.worker.merging import merge_named


def tensors_of(value, num_tensors=2):
    return {f"layer{i}": torch.full((2, 2), float(value)) for i in range(num_tensors)}


def lora_policy(rank=8):
    return perturb_adapters(load_model(TunerConfig(train_type="lora", lora_rank=rank)), named="lora_B", by=0.05)


@pytest.mark.scenario(
    "weight-sync/a-step-writes-no-weights-to-disk", clauses=["weight-sync/weights-travel-in-memory#1"]
)
def test_two_syncs_write_no_weights_to_disk(attach_backend, tmp_path, monkeypatch):
    for name in ("TMPDIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    double = NativeDouble(tensors_of(0))
    backend = attach_backend(double)
    for version in (1, 2):
        backend.push(tensors_of(version).items(), version=version)
    assert double.policy_version == 2
    assert list(tmp_path.rglob("*")) == []


class FailsInTheThirdStep(TrainerCallback):
    """A user's callback with a bug."""

    def on_step_end(self, args, state, control, **others):
        if state.global_step == 3:
            raise RuntimeError("the third step")


@pytest.mark.scenario(
    "weight-sync/the-communicator-is-closed-after-an-error", clauses=["weight-sync/weights-travel-in-memory#4"]
)
def test_the_communicator_is_closed_after_an_error(tmp_path, attach_backend):
    keys = PLAIN | {f"{R}.rollout_backend": "vllm", f"{T}.max_steps": 4, f"{T}.eval_scenes": 1}
    keys[f"{T}.callbacks"] = [f"{__name__}:FailsInTheThirdStep"]
    draw = {"samples": [{"prompt": f"{number}a"} for number in range(5)], "servers": [{}], "keys": keys}
    directory = model_directory("qwen3", tmp_path / "models")
    with scripted(draw, directory, words_of(directory)) as ((server,), named):
        write(draw, tmp_path, directory, named)
        with pytest.raises(RuntimeError, match="third step"):
            rollmatch.train(tmp_path / "run.yaml")
        assert server.policy_version == 3
        assert [name for name, _ in server.calls][-1] == "close_communicator"
        assert (server.group, server.client) == (None, None)


@pytest.mark.scenario("weight-sync/a-failed-sync-leaves-the-adapter-unmerged")
def test_a_failed_sync_leaves_the_adapter_unmerged(attach_backend):
    policy = lora_policy()
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    double = NativeDouble(dict(merged_weights(policy)))
    double.faults = {"stall": 0.1}
    backend = attach_backend(double, timeout_s=1)
    with refused("transfer-failed"):
        backend.push(named_weights(policy), version=1)
    assert double.policy_version == 0
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())


class Merging(NativeDouble):
    """Merges adapters as a server of ours does; ``forgets`` answers 200 and keeps its old weights."""

    forgets = False
    is_whole = True
    """Whether it says digests of all that it has merged."""

    def __init__(self, policy):
        super().__init__(dict(merged_weights(policy)))
        self.base = {name: weight.detach().clone() for name, weight in model_tensors(policy)}
        self.merged_digests = {}

    def sync(self, body):
        reply = super().sync(body)
        if body["adapter"] is None:
            return reply
        merges = [Merge(**merge) for merge in body["adapter"]["merges"]]
        merged = {merge.name: merge_named(merge, self.base[merge.name], self.staged) for merge in merges}
        self.merged_digests = {name: digest_of(tensor).hex() for name, tensor in merged.items()}
        said = list(self.merged_digests.items())
        return reply | {"merged_digests": dict(said if self.is_whole else said[1:])}

    def commit(self, body):
        if set(self.staged or ()) == set(self.served):
            return super().commit(body)
        state = self.policy_version if self.forgets else self.version
        self.policy_version, self.staged = state, None
        return {"policy_version": state, "committed": True}


@pytest.mark.scenario(
    "weight-sync/only-adapter-bytes-travel", clauses=["weight-sync/adapter-sync-sends-adapters-only#1"]
)
def test_only_adapter_bytes_travel(attach_backend):
    policy = lora_policy(8)
    double, adapter = Merging(policy), adapter_of(policy)
    attach_backend(double).push_adapter(adapter, version=1)
    (body,) = [body for name, body in double.calls if name == "sync"]
    lora = [weight for name, weight in policy.named_parameters() if "lora_" in name]
    sizes = [4 * torch.Size(tensor["shape"]).numel() for tensor in body["tensors"]]
    assert sum(sizes) == sum(len(bytes_of(weight.detach())) for weight in lora)
    assert all("lora_" in tensor["name"] for tensor in body["tensors"])
    own = dict(merged_weights(policy))
    assert double.merged_digests == {
        merge["name"]: digest_of(own[merge["name"]]).hex() for merge in body["adapter"]["merges"]
    }


def test_an_adapter_is_announced_by_name_until_its_merges_change(attach_backend):
    policy = lora_policy(8)
    double = Merging(policy)
    backend = attach_backend(double)
    for version in (1, 2, 3):
        if version == 3:
            for module in policy.modules():
                if hasattr(module, "lora_A"):
                    module.scaling["default"] /= 2
        backend.push_adapter(adapter_of(policy), version=version)
    assert [name for name, _ in double.calls if name.startswith("sync")] == ["sync", "sync_again", "sync"]


@pytest.mark.parametrize("wrong", ["another base", "a digest left out"])
def test_merged_weights_that_are_not_proven_are_not_committed(attach_backend, wrong):
    policy = lora_policy()
    double = Merging(policy)
    if wrong == "another base":
        double.base = {name: weight + 1 for name, weight in double.base.items()}
    else:
        double.is_whole = False
    with refused("digest-mismatch"):
        attach_backend(double).push_adapter(adapter_of(policy), version=1)
    assert double.policy_version == 0
    assert names_called(double)[-1] != "commit"


@pytest.mark.scenario(
    "weight-sync/a-silent-failure-is-seen", clauses=["weight-sync/a-failed-adapter-sync-falls-back-once-and-for-all#6"]
)
def test_a_silent_failure_is_seen(attach_backend):
    policy = lora_policy()
    double = Merging(policy)
    double.forgets = True
    assert SyncMode("adapter").push(attach_backend(double), named_weights(policy), Ranks(), version=1) == "full"
    assert names_called(double).count("sync") == 2
    assert double.policy_version == 1
