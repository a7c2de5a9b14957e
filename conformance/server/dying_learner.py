"""A learner that is killed in the middle of a sync: ``python -m conformance.server.dying_learner URL PORT VERSION``."""

import os
import signal
import sys

from conformance.rollout.digits import load_model
from conformance.server.calls import RawLearner, Server
from rollmatch.model.checkpoint import merged_weights

if __name__ == "__main__":
    url, port, version = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    learner = RawLearner(Server(url), port=port, client="dying")
    weights = {name: tensor.clone().mul_(1.5) for name, tensor in merged_weights(load_model())}
    assert learner.open()[0] == 200
    announcement = learner.announcement(weights, version=version, sync_id="dying", per_bucket=10)
    assert learner.announce(announcement) is None
    learner.send(announcement, weights, num_buckets=len(announcement["buckets"]) // 2)
    os.kill(os.getpid(), signal.SIGKILL)
