"""Weights from swift and trl trainers into a real server: queued piece by piece, told after the fact."""

import pytest

from conformance.dialects.queued_learner import QueuedLearner
from conformance.server.calls import text_batch
from conformance.server.instance import free_port

pytestmark = pytest.mark.engine
NORM = "model.language_model.norm.weight"


@pytest.fixture
def trainer(server):
    """Attached; leaves at the end."""
    attached = QueuedLearner(server, port=free_port())
    assert attached.open()[0] == 200
    yield attached
    attached.close()


def in_buckets(weights, size):
    names = list(weights)
    return [{name: weights[name] for name in names[first : first + size]} for first in range(0, len(names), size)]


def test_a_swift_sync_commits_as_one_version(trainer, policies, scene_batch, greedy):
    server = trainer.server
    for policy in (policies[1], policies[0]):
        version = server.version
        for bucket in in_buckets(policy.weights, 50):
            assert trainer.update_flattened(bucket) is None
        assert server.post("/process_weights_after_loading/")[0] == 200
        status, body = server.post("/reset_prefix_cache/")
        assert (status, body["message"].endswith("True")) == (200, True)
        assert server.version == version + 1
        assert policy.wrote(server.infer(scene_batch, **greedy)[0])


def test_a_trl_sync_is_seen_by_the_next_generate_call(trainer, policies, scene_batch, greedy):
    server, version = trainer.server, trainer.server.version
    names = list(policies[2].weights)
    for name in names[:-1]:
        assert trainer.update_named(name, policies[2].weights[name]) is None
    assert server.post("/generate/", {"prompts": [[5]], "max_tokens": 1})[0] == 200
    assert server.version == version
    assert trainer.update_named(names[-1], policies[2].weights[names[-1]]) is None
    reply = server.post("/generate/", {"prompts": [[5]], "max_tokens": 1})
    assert (reply[0], server.version) == (200, version + 1)
    assert server.post("/reset_prefix_cache/")[0] == 200
    assert server.version == version + 1
    assert policies[2].wrote(server.infer(scene_batch, **greedy)[0])


def test_an_incomplete_sync_is_refused_and_dropped(trainer, policies, scene_batch, greedy):
    server, version = trainer.server, trainer.server.version
    before, _ = server.infer(scene_batch, **greedy)
    assert trainer.update_flattened({NORM: policies[1].weights[NORM] + 1}) is None
    status, body = server.post("/reset_prefix_cache/")
    assert (status, body["code"]) == (400, "tensor-missing")
    assert server.infer(scene_batch, **greedy)[0] == before
    assert server.post("/reset_prefix_cache/")[0] == 200
    for bucket in in_buckets(policies[1].weights, 60):
        assert trainer.update_flattened(bucket) is None
    assert server.post("/reset_prefix_cache/")[0] == 200
    assert server.version == version + 1
    assert policies[1].wrote(server.infer(scene_batch, **greedy)[0])


def test_a_wrong_announcement_is_refused_and_costs_nothing(trainer, policies):
    norm = policies[0].weights[NORM]
    refusals = [
        (trainer.update_named("model.extra", norm), "tensor-unknown", "model.extra"),
        (trainer.update_named(NORM, norm, shape=[7]), "tensor-shape-mismatch", NORM),
        (trainer.update_named(NORM, norm, dtype="torch.bfloat16"), "tensor-dtype-mismatch", NORM),
        (trainer.update_flattened({NORM: norm}, end_idx=norm.numel()), "bucket-invalid", "metadatas[0]"),
    ]
    assert [(status, body["code"], body["key"]) for (status, body), _, _ in refusals] == [
        (400, code, key) for _, code, key in refusals
    ]
    assert trainer.server.infer(text_batch([[5]]), max_tokens=2)[0]
    assert trainer.update_named(NORM, norm) is None
    assert trainer.server.post("/reset_prefix_cache/")[1]["code"] == "tensor-missing"
