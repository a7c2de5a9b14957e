"""One of two ranks that share an engine; writes what it was answered: ``tensor_parallel_worker.py FOLDER``."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from conformance.rollout.digits import load_model, perturb, requests_for, scenes
from conformance.rollout.engine import open_engine
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding

SHARES = {0: range(5), 1: range(5, 8)}
"""Scenes of each rank: not as many."""
MAX_NEW_TOKENS = 40
"""Enough for two objects; two engines that step together wait for each other at every layer."""


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    decoding = Decoding(max_new_tokens=MAX_NEW_TOKENS)
    ranks = Ranks.from_environment()
    backend = open_engine(ranks, tensor_parallel_size=2)
    model, answers = load_model(), {}
    requests = requests_for([scenes()[place] for place in SHARES[ranks.rank]], rank=ranks.rank)
    for version, name in enumerate(("original", "perturbed"), start=1):
        backend.push(merged_weights(model), version=version)
        rollouts = backend.generate(requests, decoding)
        answers[name] = [[rollout.request_id, rollout.response_token_ids] for rollout in rollouts]
        perturb(model, seed=1, scale=0.3)
    backend.push(merged_weights(load_model()), version=3)
    idle = backend.generate(requests if ranks.is_primary else [], decoding)
    answers["one rank idle"] = [[rollout.request_id, rollout.response_token_ids] for rollout in idle]
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(answers))
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
