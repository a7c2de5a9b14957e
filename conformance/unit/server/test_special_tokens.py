"""Special tokens around prompts and in responses, and what a trainer of ms-swift asks before it sends adapters."""

import pytest
from tokenizers.processors import TemplateProcessing

from conformance.doubles.stand_in import STOP


@pytest.mark.parametrize(("fields", "takes_adapters"), [({}, False), ({"enable_lora": True}, True)])
def test_swift_learns_whether_the_server_takes_adapters(start, fields, takes_adapters):
    _, post, _ = start(**fields)
    said = {"engine_type": "AsyncLLMEngine", "enable_multi_turn": False, "use_gym_env": False}
    assert post("/get_engine_type/") == (200, said | {"enable_lora": takes_adapters})


def test_a_chat_ends_with_the_opening_of_an_answer_and_only_a_text_gets_special_tokens(start, monkeypatch):
    parts, post, _ = start()
    tokenizer = parts.prompts.tokenizer
    end = tokenizer.decode([STOP])
    processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, STOP)])
    monkeypatch.setattr(tokenizer.backend_tokenizer, "post_processor", processor)
    assert post("/chat/", {"messages": [[{"role": "user", "content": "a"}]]})[0] == 200
    assert post("/generate/", {"prompts": ["a"]})[0] == 200
    drawn = [tokenizer.decode(draw.prompt.token_ids) for replica in parts.pool.replicas for draw in replica.generated]
    assert sorted(drawn) == [f"{end}a", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"]
    asked = {"infer_requests": [{"messages": [{"role": "user", "content": "a"}]}], "request_config": {"max_tokens": 3}}
    (answer,) = post("/infer/", asked)[1]
    assert end not in answer["response"]["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("stop", "status"),
    [(["a"] * 64, 200), (["a"] * 65, 400), (["a" * 1024], 200), (["a" * 1025], 400), (["a"], 200), ([""], 400)],
)
def test_texts_that_end_a_response_are_few_and_short(post, stop, status):
    body = {"prompts": [[5]], "max_tokens": 2, "generation_kwargs": {"stop": stop}}
    found, reply = post("/generate/", body)
    assert found == status
    assert status == 200 or reply["code"] == "sampling-value-invalid", reply


@pytest.mark.parametrize(
    ("route", "body", "place"),
    [
        ("/generate/", {"prompts": [[5]], "max_tokens": 2}, "generation_kwargs"),
        ("/chat/", {"messages": [[{"role": "user", "content": "a"}]], "max_tokens": 2}, "generation_kwargs"),
        ("/infer/", {"infer_requests": [{"messages": [{"role": "user", "content": "a"}]}]}, "request_config"),
        ("/inference/v1/generate", {"token_ids": [5]}, "sampling_params"),
    ],
)
def test_a_single_text_that_ends_a_response_needs_no_list(start, route, body, place):
    parts, post, _ = start()
    for stop in ("END", ["END"], None):
        given = ({} if place == "generation_kwargs" else {"max_tokens": 2}) | {"stop": stop}
        status, reply = post(route, body | {place: given})
        assert status == 200, reply
    asked = [draw.params.stop for replica in parts.pool.replicas for draw in replica.generated]
    assert sorted(asked) == [(), ("END",), ("END",)]
