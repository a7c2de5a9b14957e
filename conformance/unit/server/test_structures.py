"""Structures of responses have a length."""

import pytest


@pytest.mark.parametrize("structured", [{"regex": "a" * 4097}, {"choice": ["a"] * 1025}, {"grammar": "a" * 65537}])
def test_a_long_structure_of_a_call_is_refused_with_its_body(served, structured):
    _, client = served()
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": structured}
    reply = client.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["code"]) == (422, "body-invalid")
