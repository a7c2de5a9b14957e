"""The combination lock with a policy of known probabilities, so that every value is known."""

from dataclasses import replace
from math import log
from random import Random

from conformance.doubles.locks import sample_of
from conformance.doubles.ranks import alone
from fixtures.tasks.lock import SYMBOLS, Lock
from rollmatch.environments.continuation import ContinuationRequest, Waves
from rollmatch.environments.trajectory import Trajectory, state_at

STOP = 9
LOCK = Lock(critical={1: "A", 4: "C"}, length=6)
PROBABILITIES = ((0.25,) * 4, (0.5, 0.5, 0, 0), (0.25,) * 4, (0.25,) * 4, (0.1, 0.1, 0.8, 0), (0.25,) * 4)
"""V of the prompt is 0.4, after a right first symbol 0.8."""


def spelled(token_ids):
    """Symbols of ids, the stop token left out."""
    return "".join(SYMBOLS[token_id] for token_id in token_ids if token_id != STOP)


def trajectory_of(token_ids, *, sample_id=0, version=1, **fields):
    """A whole response as the lock pays it."""
    reward = LOCK.reward(spelled(token_ids))
    return Trajectory(
        sample=sample_of(sample_id),
        prompt_token_ids=(100, sample_id),
        token_ids=tuple(token_ids),
        rewards=((len(token_ids), reward),),
        policy_version=version,
        is_finished=True,
        **fields,
    )


class LockPolicy:
    """Continues a state symbol by symbol; records its requests."""

    max_new_tokens = LOCK.length + 1

    def __init__(self, probabilities=PROBABILITIES, *, version=1):
        self.probabilities, self.version = probabilities, version
        self.requested = []

    def continue_states(self, requests):
        self.requested.append(list(requests))
        return [self._write(request) for request in requests]

    def _write(self, request):
        rng, ids = Random(request.seed), list(request.state.prefix_token_ids)
        for place in range(len(ids), LOCK.length):
            ids += rng.choices(range(len(SYMBOLS)), self.probabilities[place])
        made = trajectory_of((*ids, STOP), sample_id=request.state.sample_id, version=self.version)
        chances = [max(self.probabilities[place][token_id], 1e-9) for place, token_id in enumerate(ids)]
        return replace(made, logprobs=(*map(log, chances), 0.0))

    def answer(self, *seeds, sample_id=0):
        """Responses to the prompt."""
        start = state_at(trajectory_of((STOP,), sample_id=sample_id, version=self.version), 0)
        return [self._write(ContinuationRequest(state=start, seed=seed)) for seed in seeds]

    @property
    def num_continuations(self):
        return sum(map(len, self.requested))


def waves_of(policy, ranks=None, *, run_seed=1, step=1):
    return Waves(policy, ranks or alone(), run_seed=run_seed, step=step)


def value_of(prefix_ids):
    """Exactly."""
    return LOCK.value(spelled(prefix_ids), PROBABILITIES)
