"""Weights straight into a real server's parameters; on a CPU by gloo, the same steps as by NCCL on GPUs."""

from dataclasses import replace

import pytest
import torch

from conformance.doubles.adapted_policy import adapted
from conformance.doubles.learner_side import connected, rendezvous
from conformance.judge.calls import text_batch
from rollmatch.dialects.http import HttpServer
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.errors import RollmatchError
from rollmatch.model.checkpoint import merged_weights
from rollmatch.weights.named_weights import adapter_of
from rollmatch.weights.nccl import DirectGroup

pytestmark = pytest.mark.engine


@pytest.fixture
def sender(server, request):
    stage = getattr(request, "param", False)
    made = NativeSender([connected(server.url)], rendezvous(), transport="direct", stage=stage)
    yield made
    made.close()


def ask(server):
    """A short call, and what becomes of it."""
    return server.post_packed("/native/infer/", {"requests": text_batch([[5]]), "sampling": {"max_tokens": 2}})


def push(sender, server, weights):
    version = server.version + 1
    sender.send(weights.items(), version=version)
    assert server.version == version


@pytest.mark.parametrize("sender", [False, True], ids=["in place", "staged"], indirect=True)
def test_after_a_sync_the_server_writes_what_transformers_writes(sender, server, policies, scene_batch, greedy):
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


@pytest.mark.scenario("weight-sync/a-failed-staged-update-leaves-the-old-weights")
@pytest.mark.parametrize("sender", [True], indirect=True)
@pytest.mark.parametrize("is_broken_off", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_what_is_staged_and_fails_changes_nothing(
    sender, server, policies, scene_batch, greedy, monkeypatch, is_broken_off
):
    push(sender, server, policies[0].weights)
    version = server.version
    sender.bucket_bytes = 2**16
    sender.close()
    with monkeypatch.context() as patched:
        if is_broken_off:
            break_after(2, patched)
        else:
            change_digest(0, patched)
        with pytest.raises(RollmatchError) as caught:
            sender.send(policies[1].weights.items(), version=version + 1)
    assert caught.value.code == ("transfer-failed" if is_broken_off else "digest-mismatch")
    assert server.version == version
    assert policies[0].wrote(server.infer(scene_batch, **greedy)[0])
    push(sender, server, policies[1].weights)
    assert policies[1].wrote(server.infer(scene_batch, **greedy)[0])


@pytest.mark.wide
def test_what_runs_is_written_whole_under_one_version(instance, sender, server, policies, long_responses):
    push(sender, server, policies[1].weights)
    long_responses.of(policies[1], server)
    call, _ = long_responses.interrupted_by(lambda: push(sender, server, policies[2].weights), instance)
    long_responses.check_whole(call, policies[1], policies[2], server)


def change_digest(place, monkeypatch, *, of_merges=False):
    """One of those that follow what is sent, or of the learner's merges, which follow them."""
    sent = []

    def send(self, tensors, real=DirectGroup.broadcast_group):
        if tensors[0].dtype == torch.int64:
            sent.append(tensors)
            if len(sent) == 1 + of_merges:
                tensors[0][place, 0] += 1
        return real(self, tensors)

    monkeypatch.setattr(DirectGroup, "broadcast_group", send)


def test_a_changed_number_is_found_and_the_next_sync_repairs(
    sender, server, policies, scene_batch, greedy, monkeypatch
):
    push(sender, server, policies[0].weights)
    version, name = server.version, "model.visual.patch_embed.proj.weight"
    weights = {key: tensor.clone() for key, tensor in policies[1].weights.items()}
    place = [spec.name for spec in sender._known.plan.specs].index(name)  # as they travel
    with monkeypatch.context() as patched:
        change_digest(place, patched)
        with pytest.raises(RollmatchError) as caught:
            sender.send(weights.items(), version=version + 1)
    assert (caught.value.code, caught.value.key) == ("digest-mismatch", name)
    status, body = ask(server)
    assert (status, body["code"], server.version) == (409, "weights-broken", version)
    push(sender, server, weights)
    assert policies[1].wrote(server.infer(scene_batch, **greedy)[0])


def push_adapter(sender, server, model):
    version = server.version + 1
    sender.send_adapter(adapter_of(model), version=version)
    assert server.version == version


@pytest.mark.parametrize("use_dora", [pytest.param(False, marks=pytest.mark.wide), True], ids=["lora", "dora"])
def test_an_adapter_is_merged_into_what_is_served_and_announced_by_name_afterwards(
    sender, server, policies, scene_batch, greedy, use_dora, monkeypatch
):
    """After a full sync, and after another adapter: nothing of what was served before is left."""
    models, announced = [adapted(use_dora=use_dora, seed=seed) for seed in (1, 2)], []

    def begin(self, route, *arguments, real=HttpServer.begin, **keywords):
        announced.append(route)
        return real(self, route, *arguments, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(HttpServer, "begin", begin)
        push(sender, server, policies[2].weights)
        written = []
        for model in (*models, models[0]):
            push_adapter(sender, server, model)
            written.append(server.infer(scene_batch, **greedy)[0])
    assert [route for route in announced if "sync" in route] == ["/native/sync/"] * 2 + ["/native/sync/again/"] * 2
    for model, responses in zip(models, written, strict=False):
        push(sender, server, dict(merged_weights(model)))
        assert server.infer(scene_batch, **greedy)[0] == responses
    assert written[0] == written[2] != written[1]


def test_an_adapter_that_changes_on_its_way_leaves_the_served_weights(
    sender, server, policies, scene_batch, greedy, monkeypatch
):
    sender.rendezvous = replace(sender.rendezvous, timeout_s=5)  # over gloo, the learner waits for it
    push(sender, server, policies[1].weights)
    model, version = adapted(use_dora=False), server.version
    with monkeypatch.context() as patched:
        change_digest(0, patched)
        with pytest.raises(RollmatchError) as caught:
            sender.send_adapter(adapter_of(model), version=version + 1)
    assert caught.value.code == "digest-mismatch"
    assert "lora_" in caught.value.key
    assert server.version == version
    assert policies[1].wrote(server.infer(scene_batch, **greedy)[0])


@pytest.mark.scenario(
    "weight-sync/a-merge-in-place-that-differs-is-not-served",
    clauses=["weight-sync/adapter-sync-sends-adapters-only#2"],
)
def test_a_merge_that_differs_from_the_learners_is_not_served(sender, server, policies, monkeypatch):
    push(sender, server, policies[1].weights)
    found, version = adapter_of(adapted(use_dora=False)), server.version
    with monkeypatch.context() as patched:
        change_digest(1, patched, of_merges=True)
        with pytest.raises(RollmatchError) as caught:
            sender.send_adapter(found, version=version + 1)
    assert (caught.value.code, caught.value.key) == ("digest-mismatch", found.merges[1].name)
    status, body = ask(server)
    assert (status, body["code"], server.version) == (409, "weights-broken", version)
    push(sender, server, policies[1].weights)
