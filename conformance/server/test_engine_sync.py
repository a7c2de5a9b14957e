"""Weights over the wire into a real server with two replicas, in the native dialect."""

import pytest
import torch

from conformance.rollout.digits import LONG_QUESTION, load_model, requests_for, scenes, template_of
from conformance.server.calls import in_thread
from rollmatch.weights.digest import digest_of

pytestmark = pytest.mark.engine
HEAD = "lm_head.weight"
EMBEDDING = "model.language_model.embed_tokens.weight"


def sync(learner, policy, **fields):
    version = learner.server.version + 1
    status, body = learner.sync(policy.weights, version=version, **fields)
    assert status == 200, body
    assert body["policy_version"] == version == learner.server.version
    return body


def test_after_a_sync_the_server_writes_what_transformers_writes(learner, policies, scene_batch, greedy):
    for policy in (policies[1], policies[2], policies[0]):
        body = sync(learner, policy)
        assert body["digests"] == [digest_of(tensor).hex() for tensor in policy.weights.values()]
        responses, versions = learner.server.infer(scene_batch, **greedy)
        assert policy.wrote(responses)
        assert set(versions) == {body["policy_version"]}


def test_the_server_names_every_tensor_of_the_checkpoint(server, policies):
    _, identity = server.get("/native/identity")
    told = {spec["name"]: (spec["dtype"], tuple(spec["shape"])) for spec in identity["tensors"]}
    assert told == {name: ("float32", tuple(tensor.shape)) for name, tensor in policies[0].weights.items()}
    assert identity["aliases"] == {HEAD: EMBEDDING}
    assert identity["world_size"] == server.get("/get_world_size/")[1]["world_size"] == 2


@pytest.mark.scenario("weight-sync/a-sync-of-unchanged-weights-changes-nothing")
def test_equal_weights_change_nothing_but_the_version(learner, policies, scene_batch, greedy):
    sync(learner, policies[1])
    before, _ = learner.server.infer(scene_batch, **greedy)
    sync(learner, policies[1], digests=None)
    assert learner.server.infer(scene_batch, **greedy)[0] == before


def test_a_tied_head_may_be_sent_too_if_it_is_equal(learner, policies, scene_batch, greedy):
    weights = policies[2].weights
    version = learner.server.version + 1
    status, body = learner.sync(weights | {HEAD: weights[EMBEDDING] + 1}, version=version, sync_id="untied")
    assert (status, body["code"], body["key"]) == (400, "digest-mismatch", HEAD)
    assert learner.sync(weights | {HEAD: weights[EMBEDDING].clone()}, version=version, sync_id="tied")[0] == 200
    assert policies[2].wrote(learner.server.infer(scene_batch, **greedy)[0])


@pytest.mark.scenario(
    "weight-sync/a-cached-prompt-is-computed-anew", clauses=["weight-sync/caches-of-old-weights-are-emptied#1"]
)
def test_a_cached_long_prompt_is_computed_anew(learner, policies, greedy):
    requests = requests_for(scenes()[:1], template=template_of(LONG_QUESTION))
    assert len(requests[0].prompt_token_ids) > 256
    batch = [{
        "request_id": "long",
        "prompt_token_ids": list(requests[0].prompt_token_ids),
        "images": [requests[0].sample.images[0]],
    }]  # fmt: skip
    sampling = greedy | {"max_tokens": 24}
    written = []
    for policy in (policies[1], policies[2], policies[1]):
        sync(learner, policy)
        cold, _ = learner.server.infer(batch, **sampling)
        assert learner.server.infer(batch, **sampling)[0] == cold
        written.append(cold)
    assert written[0] == written[2] != written[1]


def test_what_runs_during_a_commit_is_written_whole_under_the_version_it_names(learner, policies, long_responses):
    """Greedy over identical prompts, so that a mixture would show as a third response."""
    server = learner.server
    for _ in range(5):  # on a busy machine all responses may end before the commit
        sync(learner, policies[1])
        old = long_responses.of(policies[1], server)
        call = in_thread(long_responses.write, server)
        while not server.health()["running"] and not call.done():
            pass
        restarted = sync(learner, policies[2])["restarted"]
        if restarted:
            break
    new = long_responses.of(policies[2], server)
    assert new != old
    responses, versions = call.result()
    assert restarted > 0
    by_version = {server.version - 1: old, server.version: new}
    for place, (ids, version) in enumerate(zip(responses, versions, strict=True)):
        assert ids == by_version[version][place], place
    assert server.version in versions


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
def test_an_adapter_is_merged_on_the_server_as_the_learner_merges_it(learner, scene_batch, greedy, use_dora):
    model, adapter, merges = adapted_policy(use_dora=use_dora)
    from rollmatch.model.checkpoint import merged_weights

    merged = dict(merged_weights(model))
    wanted = {merge["name"]: digest_of(merged[merge["name"]]).hex() for merge in merges}
    version = learner.server.version + 1
    plan = {"merges": merges, "merged_digests": wanted}
    status, body = learner.sync(adapter, version=version, adapter=plan)
    assert status == 200, body
    assert body["merged_digests"] == wanted
    responses, _ = learner.server.infer(scene_batch, **greedy)
    assert learner.sync(merged, version=version + 1)[0] == 200
    assert learner.server.infer(scene_batch, **greedy)[0] == responses
    wrong = plan | {"merged_digests": wanted | {merges[0]["name"]: "0" * 32}}
    status, body = learner.sync(adapter, version=version + 2, adapter=wrong)
    assert (status, body["code"], body["key"]) == (409, "digest-mismatch", merges[0]["name"])


def adapted_policy(*, use_dora):
    """A policy with random adapters everywhere, the convolution too; its adapter's tensors, and how they merge."""
    from peft import LoraConfig, get_peft_model

    targets = r".*(q_proj|down_proj|visual.*(qkv|linear_fc1|patch_embed\.proj))"
    model = get_peft_model(load_model(), LoraConfig(r=4, lora_alpha=6, target_modules=targets, use_dora=use_dora))
    torch.manual_seed(3)
    adapter, merges = {}, []
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            torch.nn.init.normal_(module.lora_B["default"].weight, std=0.05)
            short = name.removeprefix("base_model.model.")
            parts = {"lora_a": module.lora_A["default"].weight, "lora_b": module.lora_B["default"].weight}
            if use_dora:
                magnitude = module.lora_magnitude_vector["default"].weight
                torch.nn.init.normal_(magnitude, mean=1.0, std=0.1)
                parts["magnitude"] = magnitude
            names = {part: f"{short}.{part}" for part in parts}
            adapter |= {names[part]: tensor.detach().contiguous() for part, tensor in parts.items()}
            merges.append({"name": f"{short}.weight", **names, "scaling": module.scaling["default"]})
    return model, adapter, merges
