"""Weights that are not finite, on a real engine."""

import pytest
import torch

pytestmark = [pytest.mark.engine, pytest.mark.wide]


def test_weights_that_are_not_finite_replace_nothing(server, learner, policies):
    version = server.version + 1
    assert learner.sync(policies[1].weights, version=version, sync_id="good")[0] == 200
    bad = {name: tensor.clone() for name, tensor in policies[2].weights.items()}
    next(iter(bad.values())).view(-1)[0] = torch.nan
    status, reply = learner.sync(bad, version=version + 1, sync_id="bad")
    assert (status, reply["code"]) == (409, "weights-not-finite")
    assert server.version == version
