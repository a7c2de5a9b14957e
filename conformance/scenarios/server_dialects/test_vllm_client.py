"""The client for somebody else's trainer against a real server: it generates, and what it sends is what is served."""

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from conformance.doubles.adapted_policy import expected_of
from conformance.doubles.digits import MODEL, load_model
from conformance.doubles.instance import free_port
from rollmatch.dialects.trl.vllm_client import VLLMClient

pytestmark = pytest.mark.engine


@pytest.fixture
def client(instance):
    made = VLLMClient(server_port=instance.settings.port, group_port=free_port(), connection_timeout=30)
    yield made
    made.close_communicator()


def test_completions_come_prompt_by_prompt_from_ids_and_from_text(client):
    whole = client.generate([[5, 6, 7], [8, 9]], n=3, max_tokens=5, temperature=0.0)
    assert whole["prompt_ids"] == [[5, 6, 7], [8, 9]]
    assert whole["logprob_token_ids"] == [[[i] for i in ids] for ids in whole["completion_ids"]]
    by_ids = whole["completion_ids"]
    assert [len(ids) for ids in by_ids] == [5] * 6
    assert by_ids[0] == by_ids[1] == by_ids[2]
    assert by_ids[3] == by_ids[4] == by_ids[5]
    more = {"generation_kwargs": {"seed": 11}, "logprobs": None}
    sampled = client.generate([[5, 6, 7]], n=4, max_tokens=8, temperature=2.0, **more)
    assert len({tuple(ids) for ids in sampled["completion_ids"]}) > 1
    assert (sampled["logprobs"], sampled["logprob_token_ids"]) == (None, None)
    assert len(client.generate(["seven"], max_tokens=3, temperature=0.0)["completion_ids"]) == 1


@pytest.mark.scenario(clauses=["server-dialects/the-trl-dialect-serves-trl-and-verifiers-trainers#6"])
def test_the_likeliest_tokens_come_first_and_the_sampled_one_is_among_them(client):
    sampled = client.generate([[5, 6, 7]], max_tokens=8, temperature=2.0, logprobs=3)
    (ids,), (values,), (places,) = (sampled[name] for name in ("completion_ids", "logprobs", "logprob_token_ids"))
    assert len(ids) == len(values) == len(places)
    for token_id, row, place in zip(ids, values, places, strict=True):
        assert token_id in place
        assert row == sorted(row, reverse=True)
        assert len(row) == len(place) in (3, 4)


@pytest.mark.scenario(clauses=["server-dialects/the-trl-dialect-serves-trl-and-verifiers-trainers#5,7"])
def test_a_chat_with_images_and_with_a_regex_is_rendered_by_the_server(client):
    image = {"type": "image_pil", "image_pil": Image.new("RGB", (64, 64), "red")}
    chats = [[{"role": "user", "content": [image, {"type": "text", "text": "Count."}]}]]
    chats += [[{"role": "user", "content": "Count."}]]
    asked = client.chat(chats, n=2, max_tokens=6, structured_outputs_regex="[ab]{3}")
    with_image, without = asked["prompt_ids"]
    assert len(with_image) > len(without) > 2
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    written = [tokenizer.decode(ids, skip_special_tokens=True) for ids in asked["completion_ids"]]
    assert len(written) == 4
    assert all(len(text) == 3 and set(text) <= set("ab") for text in written)
    assert image["image_pil"].size == (64, 64)


def test_weights_that_are_sent_are_served(client, server, policies, scene_batch, greedy):
    client.init_communicator()
    for policy in (policies[1], policies[0]):
        version = server.version
        client.update_model_params(policy.weights)
        assert server.version == version + 1
        assert policy.wrote(server.infer(scene_batch, **greedy)[0])
    client.reset_prefix_cache()


@pytest.mark.scenario(clauses=["weight-sync/a-wrong-update-is-refused-and-named#5"])
def test_weights_of_another_floating_type_are_cast(client, server, policies, scene_batch, greedy, scene_requests):
    model = load_model()
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in policies[1].weights.items()}
    model.load_state_dict({name: tensor.float() for name, tensor in halved.items()}, strict=False)
    client.init_communicator()
    client.update_model_params(halved)
    stop = greedy["stop_token_ids"][0]
    responses, _ = server.infer(scene_batch, **greedy)
    assert [tuple(i for i in ids if i != stop) for ids in responses] == expected_of(model, scene_requests)


def test_a_prompt_whose_image_is_expanded_is_the_same_as_one_with_a_placeholder(client, scene_requests):
    request = scene_requests[0]
    image, ids = Image.open(request.sample.images[0]), list(request.prompt_token_ids)
    once = client.generate([ids], images=[[image]], max_tokens=4, temperature=0.0)
    (expanded,) = once["prompt_ids"]
    assert len(expanded) > len(ids)
    assert client.generate([expanded], images=[[image]], max_tokens=4, temperature=0.0) == once
