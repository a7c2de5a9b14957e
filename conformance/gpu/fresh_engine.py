"""Greedy answers of an engine that reads a checkpoint, one scene at a time.

python -m conformance.gpu.fresh_engine CHECKPOINT NUM_SCENES   (prints one line of JSON)
"""

import json
import sys

from rollmatch.run.machine import set_environment


def answers(checkpoint, num_scenes):
    from conformance.doubles.colocated_engine import open_engine
    from conformance.doubles.digits import GREEDY, requests_for, scenes
    from rollmatch.ranks import Ranks

    room = {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.05, "max_num_seqs": 64, "enforce_eager": False}
    backend = open_engine(Ranks(), model=checkpoint, **room)
    backend.policy_version = 1  # what it read is what is asked for
    return [
        backend.generate([request], GREEDY)[0].response_token_ids for request in requests_for(scenes()[:num_scenes])
    ]


if __name__ == "__main__":
    set_environment(eager=True)
    print(json.dumps(answers(sys.argv[1], int(sys.argv[2]))), flush=True)  # noqa: T201
