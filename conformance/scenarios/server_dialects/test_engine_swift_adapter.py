"""An adapter as ms-swift's trainer sends it: the real engine's greedy tokens are those of the merged policy."""

from dataclasses import asdict

import pytest
import torch
from peft import get_peft_model_state_dict

from conformance.doubles.adapted_policy import adapted, check_adapters_alone, expected_of, merged_copy
from conformance.doubles.instance import running
from conformance.doubles.learner_side import connected, rendezvous
from rollmatch.dialects.swift.client import SwiftDialect
from rollmatch.dialects.trl.sender import flat_metadata, join
from rollmatch.errors import RollmatchError
from rollmatch.weights.digest import bytes_of
from rollmatch.weights.plan import spec_of

pytestmark = pytest.mark.engine
ROUTE = "/update_adapter_flattened_param"


@pytest.fixture
def attached(instance):
    """The server, and the group of its workers that a trainer has joined as the last rank."""
    server = connected(instance.server.url)
    server.dialect = SwiftDialect(server.base_url)
    group = join(server, rendezvous())
    yield server, group
    server.control("/close_communicator")
    group.close()


def body_of(model):
    """What ms-swift posts, and the tensors that it broadcasts in one piece."""
    config = asdict(model.peft_config["default"])
    config["target_modules"] = str(config["target_modules"])
    config = {name: value for name, value in config.items() if isinstance(value, str | int | float | None)}
    named = [(name, tensor.detach().contiguous()) for name, tensor in get_peft_model_state_dict(model).items()]
    specs = [spec_of(*pair) for pair in named]
    return {"peft_config": config, "metadatas": flat_metadata(specs)}, [tensor for _, tensor in named]


def send(attached, model):
    server, group = attached
    body, tensors = body_of(model)
    server.control(ROUTE, body)
    group.broadcast(torch.cat([bytes_of(tensor) for tensor in tensors]))
    server.control("/reset_prefix_cache")


@pytest.mark.scenario(
    "server-dialects/an-adapter-alone-reaches-the-swift-dialect",
    clauses=["server-dialects/the-swift-dialect-serves-ms-swift-trainers#5"],
)
def test_each_adapter_replaces_the_one_before(attached, server, scene_batch, greedy, scene_requests):
    written = []
    for use_dora in (False, True):
        model, version = adapted(use_dora=use_dora), server.version
        send(attached, model)
        assert server.version == version + 1
        responses, versions = server.infer(scene_batch, **greedy)
        stop = greedy["stop_token_ids"][0]
        written.append([tuple(i for i in ids if i != stop) for ids in responses])
        assert written[-1] == expected_of(merged_copy(model), scene_requests)
        assert set(versions) == {version + 1}
    assert written[0] != written[1]


def test_an_adapter_that_fits_no_weight_is_refused_and_the_next_one_arrives(attached, server):
    model, version = adapted(use_dora=False), server.version
    body, _ = body_of(model)
    body["metadatas"][0]["name"] = "base_model.model.nowhere.lora_A.weight"
    with pytest.raises(RollmatchError, match="nowhere"):
        attached[0].control(ROUTE, body)
    assert server.version == version
    send(attached, model)
    assert server.version == version + 1


@pytest.mark.wide
@pytest.mark.scenario(clauses=["weight-sync/a-failed-adapter-sync-falls-back-once-and-for-all#9"])
def test_our_learner_sends_adapters_alone_after_it_has_seen_their_effect(tmp_path, scene_requests):
    with running(tmp_path / "log", enable_lora=True, drain_s=0.1) as own:
        server = connected(own.server.url)
        server.dialect = SwiftDialect(server.base_url)
        check_adapters_alone(server, scene_requests)
