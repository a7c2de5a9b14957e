"""Weights that are not finite, on a real engine."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from conformance.doubles.digits import MODEL
from conformance.doubles.instance import running
from conformance.doubles.learner_side import connected, rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.errors import RollmatchError

pytestmark = [pytest.mark.engine, pytest.mark.wide]


def spoilt(policy, place):
    """The policy's weights with one number that is none, in the tensor at ``place``."""
    weights = {name: tensor.clone() for name, tensor in policy.weights.items()}
    [*weights.values()][place].view(-1)[-1] = torch.nan
    return weights


@pytest.mark.scenario(
    "weight-sync/weights-that-are-not-finite-replace-nothing",
    clauses=["weight-sync/a-wrong-update-is-refused-and-named#6"],
)
def test_weights_that_are_not_finite_replace_nothing(server, learner, policies, scene_batch, greedy):
    version = server.version + 1
    assert learner.sync(policies[1].weights, version=version, sync_id="good")[0] == 200
    status, reply = learner.sync(spoilt(policies[2], 0), version=version + 1, sync_id="bad")
    assert (status, reply["code"]) == (409, "weights-not-finite")
    assert server.version == version
    assert policies[1].wrote(server.infer(scene_batch, **greedy)[0])


@pytest.mark.parametrize("stage", [True, False])
def test_weights_that_are_not_finite_are_not_served_by_the_direct_transport(
    server, policies, scene_batch, greedy, stage
):
    sender, version = (
        NativeSender([connected(server.url)], rendezvous(), transport="direct", stage=stage),
        server.version,
    )
    sender.send(policies[1].weights.items(), version=version + 1)
    with pytest.raises(RollmatchError) as caught:
        sender.send(spoilt(policies[2], -1).items(), version=version + 2)
    assert (caught.value.code, caught.value.key) == ("weights-not-finite", [*policies[2].weights][-1])
    assert server.version == version + 1
    if stage:
        assert policies[1].wrote(server.infer(scene_batch, **greedy)[0])
    else:
        status, body = server.post_packed("/native/infer/", {"requests": scene_batch, "sampling": {"max_tokens": 2}})
        assert (status, body["code"]) == (409, "weights-broken")
    sender.send(policies[2].weights.items(), version=version + 3)
    assert policies[2].wrote(server.infer(scene_batch, **greedy)[0])
    sender.close()


@pytest.mark.scenario(clauses=["weight-sync/caches-of-old-weights-are-emptied#2"])
def test_what_weights_with_nan_have_cached_spoils_no_later_response(tmp_path, policies, scene_batch, greedy):
    model = shutil.copytree(MODEL, tmp_path / "model")
    (file,) = model.glob("*.safetensors")
    weights = load_file(file)
    for name, tensor in weights.items():
        if "v_proj" in name or "qkv" in name:
            tensor.fill_(torch.nan)
    save_file(weights, file, metadata={"format": "pt"})
    with running(tmp_path / "log", model=str(model)) as instance:
        server = instance.server
        server.infer(scene_batch, **greedy)
        sender = NativeSender([connected(server.url)], rendezvous(), stage=False)
        sender.send(policies[1].weights.items(), version=server.version + 1)
        assert policies[1].wrote(server.infer(scene_batch, **greedy)[0])
        sender.close()
