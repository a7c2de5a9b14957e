"""Records of which a test names only what it is about."""

from typing import Any

from conformance.doubles.tokenizer import make_vocabulary
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


def make_rollout(response: tuple[int, ...], *, finish_reason: str = "stop", **fields: Any) -> Rollout:
    """One that the stop token of the double's vocabulary has ended, or its limit."""
    stop_id = make_vocabulary().stop_id if finish_reason == "stop" else None
    usual = {"request_id": "0.0.0", "prompt_token_ids": (1,), "stop_id": stop_id, "policy_version": 1}
    return Rollout(**usual | fields, response_token_ids=response)


def make_reply(request: RolloutRequest, response: tuple[int, ...], *, version: int, **fields: Any) -> Rollout:
    ids = {"request_id": request.request_id, "prompt_token_ids": request.token_ids}
    return make_rollout(response, **ids | fields, policy_version=version)
