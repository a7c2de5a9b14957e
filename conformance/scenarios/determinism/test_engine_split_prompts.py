"""A seeded response of a real engine is the same however its prompt is divided over the engine's steps."""

import pytest

from rollmatch.data.ids import pack_ids, unpack_ids

pytestmark = pytest.mark.engine
LENGTHS = (20, 90, 300, 40, 200, 310)
"""Unit: tokens. A step of the server is of 256."""


def written(server, places):
    """Sampled responses, all of one call."""
    requests = [
        {
            "request_id": str(place),
            "prompt_token_ids": pack_ids([100 + (7 * place + 3 * i) % 200 for i in range(LENGTHS[place])]),
            "images": [],
            "seed": place + 1,
        }
        for place in places
    ]
    sampling = {"max_tokens": 30, "temperature": 1.0, "ignore_eos": True}
    status, body = server.post_packed("/native/infer/", {"requests": requests, "sampling": sampling})
    assert status == 200, body
    return [unpack_ids(answer["response_token_ids"]).tolist() for answer in body["responses"]]


@pytest.mark.scenario(
    "determinism/six-prompts-that-are-more-than-a-step-holds",
    clauses=["determinism/every-request-has-a-seed-of-its-own#6"],
)
def test_responses_written_together_are_those_written_alone(learner, policies):
    server = learner.server
    assert learner.sync(policies[1].weights, version=server.version + 1)[0] == 200
    together = written(server, range(6))
    assert together == [written(server, [place])[0] for place in range(6)]
    assert len(set(map(tuple, together))) == 6
