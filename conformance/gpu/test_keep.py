"""Weights change within responses of an engine on a GPU, which decodes ahead of its scheduler and replays graphs."""

from collections import Counter

import pytest
import torch

from conformance.doubles.digits import policy_weights, requests_for, scenes
from conformance.doubles.instance import ENGINE, running
from conformance.doubles.kept_responses import SampledResponses
from conformance.doubles.learner_side import connected, rendezvous
from rollmatch.dialects.native.sender import NativeSender

LENGTH, NUM_SCENES = 1800, 2
LONG = {"enforce_eager": False, "kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.05}


@pytest.mark.gpu(2)
def test_the_new_weights_write_the_rest_of_responses_under_way(tmp_path):
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    policies = [policy_weights(seed, device, scale=0.2) for seed in (1, 2, 3)]
    fields = {"gpus": ("0",), "drain_s": 0.1, "max_model_len": 2048, "engine_arguments": ENGINE | LONG}
    with running(tmp_path / "log", load_format="dummy", **fields) as instance:
        sender = NativeSender([connected(instance.server.url)], rendezvous(join_timeout_s=60.0), stage=False, keep=True)
        sender.send(policies[0].items(), version=1)
        sampled = SampledResponses(instance, requests_for(scenes()[:NUM_SCENES]), length=LENGTH)
        noise = sampled.errors(sampled.write(), policies[0]).max()
        assert noise < 0.1  # products of 19 bits on a GPU
        for first, stage in ((1, False), (4, True)):
            sender.close()  # the next group may be of another kind
            sender.stage = stage
            with sampled.held() as call:
                pass  # engines that stand still take no weights
            for later in (1, 2):
                sender.send(policies[later].items(), version=first + later)
            rollouts = call.result()
            sampled.check(rollouts, dict(enumerate(policies, start=first)), tolerance=2 * noise)
            counted = Counter(tuple(version for version, _ in rollout.policy_versions) for rollout in rollouts)
            assert counted == {(first, first + 1, first + 2): len(rollouts)}, counted
            assert sender.transport == "direct"
            sender.send(policies[0].items(), version=first + 3)
        sender.close()
