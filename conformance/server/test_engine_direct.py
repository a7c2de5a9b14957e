"""Weights straight into a real server's parameters; on a CPU by gloo, the same steps as by NCCL on GPUs."""

import pytest
import torch

from conformance.dialects.learner_side import connected, rendezvous
from conformance.server.calls import text_batch
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.errors import RollmatchError
from rollmatch.weights.nccl import DirectGroup

pytestmark = pytest.mark.engine


@pytest.fixture
def sender(server):
    made = NativeSender([connected(server.url)], rendezvous(), transport="direct")
    yield made
    made.close()


def ask(server):
    """A short call, and what becomes of it."""
    return server.post_packed("/native/infer/", {"requests": text_batch([[5]]), "sampling": {"max_tokens": 2}})


def push(sender, server, weights):
    version = server.version + 1
    sender.send(weights.items(), version=version)
    assert server.version == version


def test_after_a_sync_in_place_the_server_writes_what_transformers_writes(
    sender, server, policies, scene_batch, greedy
):
    for policy in (policies[1], policies[2], policies[0]):
        push(sender, server, policy.weights)
        responses, versions = server.infer(scene_batch, **greedy)
        assert policy.wrote(responses)
        assert set(versions) == {server.version}


def break_after(num_buckets, monkeypatch):
    """The learner leaves after so many buckets."""
    sent = []

    def send(self, tensors, real=DirectGroup.broadcast_group):
        if len(sent) == num_buckets:
            self.close()
        sent.append(tensors)
        return real(self, tensors)

    monkeypatch.setattr(DirectGroup, "broadcast_group", send)


@pytest.mark.scenario(
    "weight-sync/a-failed-update-in-place-is-repaired-by-a-full-sync",
    clauses=["weight-sync/no-request-sees-two-versions#4"],
)
def test_what_was_broken_off_is_refused_until_a_full_sync(sender, server, policies, scene_batch, greedy, monkeypatch):
    push(sender, server, policies[0].weights)
    version = server.version
    sender.bucket_bytes = 2**16
    sender.close()
    with monkeypatch.context() as patched:
        break_after(2, patched)
        with pytest.raises(RollmatchError) as caught:
            sender.send(policies[1].weights.items(), version=version + 1)
    assert caught.value.code == "transfer-failed"
    status, body = ask(server)
    assert (status, body["code"]) == (409, "weights-broken")
    assert server.version == version
    push(sender, server, policies[1].weights)
    assert policies[1].wrote(server.infer(scene_batch, **greedy)[0])


def test_what_runs_is_written_whole_under_one_version(instance, sender, server, policies, long_responses):
    push(sender, server, policies[1].weights)
    long_responses.of(policies[1], server)
    call, _ = long_responses.interrupted_by(lambda: push(sender, server, policies[2].weights), instance)
    long_responses.check_whole(call, policies[1], policies[2], server)


def test_a_changed_number_is_found_and_the_next_sync_repairs(
    sender, server, policies, scene_batch, greedy, monkeypatch
):
    push(sender, server, policies[0].weights)
    version, name = server.version, "model.visual.patch_embed.proj.weight"
    weights = {key: tensor.clone() for key, tensor in policies[1].weights.items()}
    place = [spec.name for spec in sender._known[0].specs].index(name)  # as they travel

    def send(self, tensors, real=DirectGroup.broadcast_group):
        if tensors[0].dtype == torch.int64:
            tensors[0][place, 0] += 1
        return real(self, tensors)

    with monkeypatch.context() as patched:
        patched.setattr(DirectGroup, "broadcast_group", send)
        with pytest.raises(RollmatchError) as caught:
            sender.send(weights.items(), version=version + 1)
    assert (caught.value.code, caught.value.key) == ("digest-mismatch", name)
    status, body = ask(server)
    assert (status, body["code"], server.version) == (409, "weights-broken", version)
    push(sender, server, weights)
    assert policies[1].wrote(server.infer(scene_batch, **greedy)[0])
