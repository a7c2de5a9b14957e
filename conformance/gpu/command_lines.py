"""``rollmatch serve`` and ``rollmatch train`` as people type them."""

import sys

from conformance.rollout.digits import absolute

VLLM = "custom.extra.rollout_matching.vllm"


def command(name, config, gpus, overrides):
    sets = [part for override in absolute(*overrides) for part in ("--set", override)]
    return [sys.executable, "-m", "rollmatch.launch.cli", name, str(config), "--gpus", gpus, *sets]
