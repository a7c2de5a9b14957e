"""Weights over the wire into a real server with two replicas, in the native dialect."""

from dataclasses import asdict

import pytest
import torch

from conformance.doubles.adapted_policy import adapted
from conformance.doubles.learner_side import sync
from rollmatch.model.checkpoint import merged_weights
from rollmatch.weights.digest import digest_of
from rollmatch.weights.named_weights import adapter_of

pytestmark = pytest.mark.engine
HEAD = "lm_head.weight"
EMBEDDING = "model.language_model.embed_tokens.weight"


def test_the_server_names_every_tensor_of_the_checkpoint(server, policies):
    _, identity = server.get("/native/identity")
    described = {spec["name"]: (spec["dtype"], tuple(spec["shape"])) for spec in identity["tensors"]}
    assert described == {name: ("float32", tuple(tensor.shape)) for name, tensor in policies[0].weights.items()}
    assert identity["aliases"] == {HEAD: EMBEDDING}
    assert identity["world_size"] == server.get("/get_world_size/")[1]["world_size"] == 2


def test_a_tied_head_may_be_sent_too_if_it_is_equal(learner, policies, scene_batch, greedy):
    weights = policies[2].weights
    version = learner.server.version + 1
    status, body = learner.sync(weights | {HEAD: weights[EMBEDDING] + 1}, version=version, sync_id="untied")
    assert (status, body["code"], body["key"]) == (400, "digest-mismatch", HEAD)
    assert learner.sync(weights | {HEAD: weights[EMBEDDING].clone()}, version=version, sync_id="tied")[0] == 200
    assert policies[2].wrote(learner.server.infer(scene_batch, **greedy)[0])


def test_what_runs_during_a_commit_is_written_whole_under_the_version_it_names(
    instance, learner, policies, long_responses
):
    """Greedy over identical prompts, so that a mixture would show as a third response."""
    server = learner.server
    sync(learner, policies[1])
    long_responses.of(policies[1], server)
    version, choice = server.version + 1, {"client": "learner", "sync_id": "staged"}
    assert learner.sync(policies[2].weights, version=version, sync_id="staged", commit=False)[0] == 200
    call, (status, body) = long_responses.interrupted_by(lambda: server.post("/native/sync/commit/", choice), instance)
    assert (status, body["policy_version"]) == (200, version)
    assert body["restarted"] > 0
    long_responses.check_whole(call, policies[1], policies[2], server)


def test_staged_weights_are_dropped_or_committed(learner, policies, scene_batch, greedy):
    server = learner.server
    sync(learner, policies[0])
    version = server.version
    drop, commit = ({"client": "learner", "sync_id": sync_id} for sync_id in ("dropped", "kept"))
    status, body = learner.sync(policies[1].weights, version=version + 1, sync_id="dropped", commit=False)
    assert (status, body["committed"], body["policy_version"]) == (200, False, version)
    assert policies[0].wrote(server.infer(scene_batch, **greedy)[0])
    refused = server.post("/native/sync/", learner.announcement(policies[1].weights, version=version + 1, sync_id="x"))
    assert (refused[0], refused[1]["code"]) == (409, "update-in-progress")
    assert server.post("/native/sync/drop/", drop) == (200, {"dropped": True})
    assert server.post("/native/sync/commit/", drop)[1]["code"] == "nothing-staged"
    assert policies[0].wrote(server.infer(scene_batch, **greedy)[0])
    assert learner.sync(policies[1].weights, version=version + 1, sync_id="kept", commit=False)[0] == 200
    assert server.post("/native/sync/commit/", commit)[1]["policy_version"] == version + 1
    assert policies[1].wrote(server.infer(scene_batch, **greedy)[0])


@pytest.mark.scenario("weight-sync/a-flipped-bit-is-found")
def test_a_flipped_bit_is_found_and_the_next_sync_works(learner, policies, scene_batch, greedy):
    sync(learner, policies[0])
    name = "model.visual.patch_embed.proj.weight"
    sent = {key: tensor.clone() for key, tensor in policies[1].weights.items()}
    sent[name].view(torch.int32).view(-1)[5] ^= 1
    version = learner.server.version + 1
    for place, digests in enumerate(("announced", None)):
        fields = {} if digests else {"digests": None}
        status, body = learner.sync(policies[1].weights, version=version, sync_id=f"bad{place}", sent=sent, **fields)
        assert (status, body["code"], body["key"]) == (409, "digest-mismatch", name)
        assert learner.server.version == version - 1
        assert policies[0].wrote(learner.server.infer(scene_batch, **greedy)[0])
    sync(learner, policies[1])


@pytest.mark.scenario(
    "weight-sync/only-adapter-bytes-travel", clauses=["weight-sync/adapter-sync-sends-adapters-only#1"]
)
@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_an_adapter_is_merged_on_the_server_as_the_learner_merges_it(learner, policies, scene_batch, greedy, use_dora):
    model = adapted(use_dora=use_dora)
    found, merged = adapter_of(model), dict(merged_weights(model))
    adapter, merges = dict(found.tensors), [asdict(merge) for merge in found.merges]
    wanted = {merge["name"]: digest_of(merged[merge["name"]]).hex() for merge in merges}
    assert any("patch_embed" in name for name in wanted)  # a convolution
    version = learner.server.version + 1
    plan = {"merges": merges, "merged_digests": wanted}
    status, body = learner.sync(adapter, version=version, adapter=plan)
    assert status == 200, body
    assert body["merged_digests"] == wanted
    responses, _ = learner.server.infer(scene_batch, **greedy)
    sync(learner, policies[1])  # weights of another model stand where the adapter has none
    assert learner.sync(adapter, version=version + 2, adapter=plan)[0] == 200
    assert learner.server.infer(scene_batch, **greedy)[0] == responses
    assert learner.sync(merged, version=version + 3)[0] == 200
    assert learner.server.infer(scene_batch, **greedy)[0] == responses
    wrong = plan | {"merged_digests": wanted | {merges[0]["name"]: "0" * 32}}
    status, body = learner.sync(adapter, version=version + 4, adapter=wrong)
    assert (status, body["code"], body["key"]) == (409, "digest-mismatch", merges[0]["name"])
