"""A client of servers that counts as synced, its configuration and its requests."""

import torch

from conformance.doubles.configs import config_with
from conformance.doubles.learner_side import TEMPLATE, rendezvous
from conformance.doubles.records import make_request
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding, derive_seed
from rollmatch.run.connect import connect_servers

SECOND = Ranks(rank=1, learner_world_size=2)
SHORT = Decoding(max_new_tokens=4)
MEETING = rendezvous(port=23000, timeout_s=2, join_timeout_s=2)


def config_for(url, *overrides, port=23000):
    named = (f"~.vllm.server.base_url={url}", f"~.vllm.server.group_port={port}")
    return config_with("~.vllm.mode=server", *named, *overrides)


def requests_of(num_requests, *, step=0):
    return [
        make_request(
            i,
            request_id=f"{step}.0.{i}",
            prompt_token_ids=(1, i),
            seed=derive_seed(7, step=step, rank=0, index=i),
        )
        for i in range(num_requests)
    ]


def backend_of(url, *overrides):
    """A backend that counts as synced, of a rank that sends no weights."""
    backend = connect_servers(config_for(url, *overrides), TEMPLATE, ranks=SECOND)
    backend.push([], version=1)
    return backend


def tensors_of(value):
    return {"a": torch.full((2, 2), value), "b": torch.full((3,), value)}
