"""What a call gets that says nothing of sampling, in each dialect."""

import pytest


@pytest.mark.parametrize(
    ("route", "body", "max_tokens", "logprobs"),
    [
        ("/generate/", {"prompts": [[5]]}, 16, True),
        ("/chat/", {"messages": [[{"role": "user", "content": "3"}]]}, 16, True),
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5]}]}, 63, False),
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5]}], "request_config": {"max_tokens": 7}}, 7, False),
        ("/inference/v1/generate/", {"token_ids": [5]}, 63, False),
    ],
)
def test_a_body_without_rules_means_one_response_of_the_models_own_distribution(
    stand_in, post, route, body, max_tokens, logprobs
):
    status, reply = post(route, body)
    (draw,) = [draw for replica in stand_in[0].pool.replicas for draw in replica.generated]
    sampling = draw.params
    assert (status, sampling.max_tokens, sampling.logprobs) == (200, max_tokens, logprobs)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, -1, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    if route == "/infer/":
        (choice,) = reply[0]["response"]["choices"]
        assert (choice["token_ids"], choice["logprobs"]) == (None, None)
