"""Wrong types, values and fields are 4xx in every dialect, before an engine sees them."""

import pytest

from conformance.doubles.request_bodies import call, native

OF_MS_SWIFT = {
    "infer_requests": [
        {
            "messages": [{"role": "user", "content": "Look."}],
            "images": [],
            "audios": [],
            "videos": [],
            "tools": None,
            "objects": {},
            "chat_template_kwargs": {},
            "data_dict": {},
            "uuid": None,
            "add_eos": None,
        }
    ],
    "request_config": {
        "max_tokens": 2,
        "temperature": None,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "num_beams": 1,
        "stop": [],
        "repetition_penalty": None,
        "seed": None,
        "stream": False,
        "logprobs": False,
        "top_logprobs": None,
        "n": 1,
        "prompt_logprobs": None,
        "best_of": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "length_penalty": 1.0,
        "return_details": False,
        "structured_outputs_regex": None,
    },
    "metrics": None,
    "use_tqdm": True,
    "adapter_request": None,
}
"""What ms-swift 4.6's own client sends: every field, whether it is set or not."""
TENSOR = {"name": "model.norm.weight", "dtype": "float32", "shape": [-1]}


@pytest.mark.parametrize(
    ("route", "body", "status", "code"),
    [
        ("/generate/", {"prompts": [[2**31]]}, 422, "body-invalid"),
        ("/generate/", {"prompts": [[-1]]}, 422, "body-invalid"),
        ("/generate/", {"prompts": [[5]], "what_else": 1}, 422, "body-invalid"),
        ("/generate/", {"prompts": [[5]], "guided_decoding_regex": "a+"}, 422, "body-invalid"),
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
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5], "images": [{"bytes": 3}]}]}, 422, "body-invalid"),
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5], "images": [{"path": []}]}]}, 422, "body-invalid"),
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5], "colour": 1}]}, 422, "body-invalid"),
        ("/infer/", OF_MS_SWIFT, 200, None),
        ("/infer/", {"infer_requests": [{"prompt_token_ids": [5], "tools": [{}]}]}, 422, "body-invalid"),
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
        ("/generate/", {"prompts": [[5]], "structured_outputs_regex": ""}, 422, "body-invalid"),
        ("/generate/", {"prompts": [[5]], "structured_outputs_regex": "a" * 4097}, 422, "body-invalid"),
        *(
            ("/init_communicator/", {"host": "127.0.0.1", "port": port, "world_size": size}, 422, "body-invalid")
            for port, size in ((0, 3), (65536, 3), (23000, 0), (23000, 4097))
        ),
        (
            "/infer/",
            {"infer_requests": [{"prompt_token_ids": [5]}], "request_config": {"n": 0}},
            400,
            "sampling-value-invalid",
        ),
        ("/native/infer/", native([[5]], seed=2**63), 422, "body-invalid"),
        ("/update_named_param/", TENSOR, 422, "body-invalid"),
        (
            "/update_flattened_params/",
            {"metadatas": [TENSOR | {"start_idx": 0, "end_idx": -4, "numel": -1}]},
            422,
            "body-invalid",
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
