"""Wrong values are 4xx in every dialect, before an engine sees them; what a schema refuses, test_openapi.py draws."""

import pytest

from conformance.doubles.request_bodies import call

ASKED = {"messages": [{"role": "user", "content": "Look."}], "objects": {}, "chat_template_kwargs": {}, "data_dict": {}}
ASKED |= {"images": [], "audios": [], "videos": [], **dict.fromkeys(("tools", "uuid", "add_eos"))}
CONFIG = {"max_tokens": 2, "num_beams": 1, "n": 1, "stop": [], "length_penalty": 1.0}
CONFIG |= dict.fromkeys(("stream", "logprobs", "return_details"), False)
CONFIG |= dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0)
CONFIG |= dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "top_logprobs"))
CONFIG |= dict.fromkeys(("prompt_logprobs", "best_of", "structured_outputs_regex"))
OF_MS_SWIFT = {"infer_requests": [ASKED], "request_config": CONFIG, "use_tqdm": True}
OF_MS_SWIFT |= dict.fromkeys(("metrics", "adapter_request"))
"""What ms-swift 4.6's own client sends: every field, whether it is set or not."""


@pytest.mark.parametrize(
    ("route", "body", "status", "code"),
    [
        ("/generate/", {"prompts": [[5]], "structured_outputs_regex": None}, 200, None),
        ("/generate/", {"prompts": [[5]], "images": []}, 200, None),
        ("/generate/", {"prompts": [[5], [6]], "images": [None]}, 400, "images-misfit"),
        ("/generate/", {"prompts": [[5]], "generation_kwargs": {"seed": "x"}}, 400, "sampling-value-invalid"),
        ("/generate/", {"prompts": [[5]], "generation_kwargs": {"seed": 2**63}}, 400, "sampling-value-invalid"),
        ("/generate/", {"prompts": [[5]], "generation_kwargs": {"stop": [1]}}, 400, "sampling-value-invalid"),
        ("/generate/", {"prompts": [[5]], "generation_kwargs": {"stop": ""}}, 400, "sampling-value-invalid"),
        ("/generate/", {"prompts": [[5]], "generation_kwargs": {"stop_token_ids": "x"}}, 400, "sampling-value-invalid"),
        ("/generate/", {"prompts": [[5]], "generation_kwargs": {"logit_bias": [1]}}, 400, "sampling-value-invalid"),
        (
            "/generate/",
            {"prompts": [[5]], "generation_kwargs": {"logit_bias": dict.fromkeys(map(str, range(1025)), 1.0)}},
            400,
            "sampling-value-invalid",
        ),
        (
            "/generate/",
            {"prompts": [[5]], "generation_kwargs": {"logit_bias": {"9999": 1.0}}},
            400,
            "sampling-value-invalid",
        ),
        (
            "/generate/",
            {"prompts": [[5]], "generation_kwargs": {"stop_token_ids": [9999]}},
            400,
            "sampling-value-invalid",
        ),
        ("/generate/", {"prompts": [[5]], "top_k": 2**31}, 400, "sampling-value-invalid"),
        ("/infer/", OF_MS_SWIFT, 200, None),
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5], "tools": []}]}, 200, None),
        (
            "/infer/",
            {"infer_requests": [{"prompt_token_ids": [5]}], "request_config": {"num_beams": 1, "stream": False}},
            200,
            None,
        ),
        (
            "/infer/",
            {"infer_requests": [{"prompt_token_ids": [5]}], "request_config": {"num_beams": 2}},
            400,
            "sampling-value-invalid",
        ),
        *(
            (
                "/infer/",
                {"infer_requests": [{"prompt_token_ids": [5]}], "request_config": unserved},
                400,
                "sampling-value-invalid",
            )
            for unserved in ({"stream": True}, {"prompt_logprobs": 1}, {"top_logprobs": 1}, {"num_beams": True})
        ),
        *(("/generate/", {"prompts": [[5]], "logprobs": number}, 200, None) for number in (0, 20, None)),
        *(("/generate/", {"prompts": [[5]], "logprobs": number}, 400, "sampling-value-invalid") for number in (-1, 21)),
        (
            "/infer/",
            {"infer_requests": [{"prompt_token_ids": [5]}], "request_config": {"n": 0}},
            400,
            "sampling-value-invalid",
        ),
    ],
)
def test_wrong_fields_are_4xx_in_every_dialect(served, route, body, status, code):
    parts, client = served()
    assert call(client, route, body)[:2] == (status, code)
    if status != 200:
        assert not any(replica.generated for replica in parts.pool.replicas)


@pytest.mark.parametrize(
    "raw", [b'{"prompts": ["\xff"]}', b"[" * 5000 + b"]" * 5000, b'{"prompts": 1e999}', b'{"prompts": ["\\ud800"]}']
)
def test_bodies_that_are_no_json_are_422(served, raw):
    _, client = served()
    reply = client.post("/generate/", content=raw, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["code"]) == (422, "body-invalid")


def test_a_video_placeholder_reaches_no_engine(served):
    parts, client = served()
    (video,) = parts.prompts._unservable
    assert call(client, "/generate/", {"prompts": [[5, video]]})[:2] == (400, "token-id-invalid")


@pytest.mark.parametrize(
    ("route", "body_of"),
    [
        ("/generate/", lambda ids: {"prompts": [ids]}),
        ("/inference/v1/generate/", lambda ids: {"token_ids": ids, "sampling_params": {"max_tokens": 1}}),
    ],
)
@pytest.mark.parametrize(("wrong", "status", "code"), [(-1, 422, "body-invalid"), (10**6, 400, "token-id-invalid")])
def test_no_token_reaches_an_engine_that_the_vocabulary_lacks(served, route, body_of, wrong, status, code):
    parts, client = served()
    assert call(client, route, body_of([5, wrong, 6]))[:2] == (status, code)
    assert not any(replica.generated for replica in parts.pool.replicas)
