"""Records of which a test names only what it is about."""

from typing import Any

from rollmatch.records import GroundTruth, Rollout, RolloutRequest, Sample, Segment


def make_sample(*objects: GroundTruth, **fields: Any) -> Sample:
    usual = {"sample_id": 0, "origin": "x:1", "images": (), "width": 8, "height": 8}
    return Sample(**usual | fields, objects=objects)


def make_request(number: int = 0, **fields: Any) -> RolloutRequest:
    """That of a place in a list; its sample has the same number."""
    sample = make_sample(sample_id=number, origin=f"x.jsonl:{number + 1}")
    usual = {"request_id": f"0.0.{number}", "sample": sample, "prompt_token_ids": (1,), "seed": number + 1}
    return RolloutRequest(**usual | fields)


def segment_with(token_ids: tuple[int, ...], **fields: Any) -> Segment:
    usual = {"sample": make_sample(), "policy_version": 1, "prompt_len": 1, "prefix_len": 0}
    return Segment(**usual | fields, token_ids=token_ids)


def make_rollout(response: tuple[int, ...], **fields: Any) -> Rollout:
    usual = {"request_id": "0.0.0", "prompt_token_ids": (1,), "finish_reason": "stop", "policy_version": 1}
    return Rollout(**usual | fields, response_token_ids=response)


def make_reply(request: RolloutRequest, response: tuple[int, ...], *, version: int, **fields: Any) -> Rollout:
    ids = {"request_id": request.request_id, "prompt_token_ids": request.token_ids}
    return make_rollout(response, **ids | fields, policy_version=version)
