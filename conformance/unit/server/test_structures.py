"""Structures of responses have a length."""

import pytest

from conformance.doubles.request_bodies import call

LONGEST, MOST, LONGEST_GRAMMAR = 4096, 1024, 65_536


@pytest.mark.parametrize(
    ("kind", "beyond", "at_the_bound"),
    [
        ("regex", "a" * (LONGEST + 1), "a" * LONGEST),
        ("choice", ["a"] * (MOST + 1), ["a" * LONGEST] * MOST),
        ("choice", ["a" * (LONGEST + 1)], ["a"]),
        ("grammar", "a" * (LONGEST_GRAMMAR + 1), "a" * LONGEST_GRAMMAR),
        ("structural_tag", "a" * (LONGEST_GRAMMAR + 1), "a" * LONGEST_GRAMMAR),
    ],
    ids=["regular expression", "choices", "choice", "grammar", "tags"],
)
def test_a_long_structure_of_a_call_is_refused_with_its_body(served, kind, beyond, at_the_bound):
    _, client = served()
    body = {"prompt": "a", "max_tokens": 2}
    found = [
        call(client, "/v1/completions", body | {"structured_outputs": {kind: value}})[1]
        for value in (beyond, at_the_bound)
    ]
    assert found == ["body-invalid", "openai-unavailable"], "these engines are not vLLM's"


async def accept(_):
    """In place of what compiles a structure."""


@pytest.mark.parametrize(
    ("route", "body_with", "refusal"),
    [
        ("/generate/", lambda regex: {"prompts": [[5]], "structured_outputs_regex": regex}, (422, "body-invalid")),
        (
            "/chat/",
            lambda regex: {"messages": [[{"role": "user", "content": "a"}]], "structured_outputs_regex": regex},
            (422, "body-invalid"),
        ),
        (
            "/inference/v1/generate",
            lambda regex: {"token_ids": [5], "sampling_params": {"structured_outputs": {"regex": regex}}},
            (400, "sampling-value-invalid"),
        ),
    ],
    ids=["generate", "chat", "token ids"],
)
def test_a_long_regular_expression_is_refused_on_the_other_routes(served, route, body_with, refusal):
    parts, client = served()
    parts.generator.structures.check = accept
    assert call(client, route, body_with("a" * (LONGEST + 1)))[:2] == refusal
    assert not any(replica.generated for replica in parts.pool.replicas)
    assert call(client, route, body_with("a" * LONGEST))[0] == 200
