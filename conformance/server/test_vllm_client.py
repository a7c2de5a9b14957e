"""The client for somebody else's trainer against a real server: it generates, and what it sends is what is served."""

import pytest

from conformance.server.instance import free_port
from rollmatch.dialects.trl.vllm_client import VLLMClient

pytestmark = pytest.mark.engine


@pytest.fixture
def client(instance):
    made = VLLMClient(server_port=instance.settings.port, group_port=free_port(), connection_timeout=30)
    yield made
    made.close_communicator()


def test_completions_come_prompt_by_prompt_from_ids_and_from_text(client):
    by_ids = client.generate([[5, 6, 7], [8, 9]], n=3, max_tokens=5, temperature=0.0)
    assert [len(ids) for ids in by_ids] == [5] * 6
    assert by_ids[0] == by_ids[1] == by_ids[2]
    assert by_ids[3] == by_ids[4] == by_ids[5]
    sampled = client.generate([[5, 6, 7]], n=4, max_tokens=8, temperature=2.0, seed=11)
    assert len({tuple(ids) for ids in sampled}) > 1
    assert len(client.generate(["seven"], max_tokens=3, temperature=0.0)) == 1


def test_weights_that_are_sent_are_served(client, server, policies, scene_batch, greedy):
    client.init_communicator()
    for policy in (policies[1], policies[0]):
        version = server.version
        client.update_model_params(policy.weights)
        assert server.version == version + 1
        assert policy.wrote(server.infer(scene_batch, **greedy)[0])
    client.reset_prefix_cache()
