"""Environments whose calls run in worker processes: a call that hangs is ended, one that crashes costs its process.

Between calls an environment is its pickled state, in the learner: any worker takes any call, so that a lost worker
loses no episode but the one whose call it ran. A clone is the same state with another generator.
"""

import copy
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

from rollmatch.environments.environment import MakeEnvironment, StepResult, begin_with, take_step
from rollmatch.environments.limits import EnvironmentLimits, EpisodeFailed, timed_out
from rollmatch.environments.worker_processes import workers_of
from rollmatch.errors import TargetError, kind_and_text
from rollmatch.records import Sample

Result = TypeVar("Result")
State = tuple[bytes, Hashable]
"""Pickled environment, fingerprint."""


class WorkerEnvironment:
    """An environment of ``make`` in worker processes; satisfies ``Environment``. Errors: ``EpisodeFailed``.

    ``modules``: where its code is.
    """

    def __init__(self, make: MakeEnvironment, limits: EnvironmentLimits, modules: Sequence[str]) -> None:
        self._make, self._limits, self._modules = make, limits, (__name__, *modules)
        self._state: State = (b"", None)
        self._rng: np.random.Generator | None = None
        """What the next step draws from; None: what the state holds."""
        self._key = ""

    def reset(self, sample: Sample, rng: np.random.Generator) -> str:
        """Begin."""
        self._key, self._rng = sample.origin, None
        self._state, observation = self._run("reset", _begin, self._make, sample, rng)
        return observation

    def step(self, action: str) -> StepResult:
        """As the protocol."""
        self._state, result = self._run("step", _step, self._state[0], self._rng, action, self._key)
        self._rng = None
        return result

    def clone(self, rng: np.random.Generator) -> "WorkerEnvironment":
        """The same state; no call."""
        twin = copy.copy(self)
        twin._rng = rng
        return twin

    def fingerprint(self) -> Hashable:
        """As the environment's after its last call."""
        return self._state[1]

    def _run(
        self, name: str, function: Callable[..., tuple[State, Result]], *arguments: object
    ) -> tuple[State, Result]:
        from pebble import ProcessExpired

        limits = self._limits
        try:
            return workers_of(limits.processes, limits.timeout_s, self._modules).call(function, *arguments, limits)
        except TimeoutError as error:  # the worker names what the environment raised
            raise timed_out(limits.timeout_s) from error
        except ProcessExpired as error:
            problem = f"the worker process died in {name} (exit code {error.exitcode})"
            remedy = "Look at its output above; a process killed by signal 9 has mostly run out of memory."
            raise EpisodeFailed(problem, code="environment-died", key=self._key, remedy=remedy) from error


def _begin(
    make: MakeEnvironment, sample: Sample, rng: np.random.Generator, limits: EnvironmentLimits
) -> tuple[State, str]:
    environment, observation = begin_with(make, sample, rng, limits)
    return (_pickled(environment, sample.origin), environment.fingerprint()), observation


def _step(
    state: bytes, rng: np.random.Generator | None, action: str, key: str, limits: EnvironmentLimits
) -> tuple[State, StepResult]:
    environment = pickle.loads(state)
    if rng is not None:
        environment = environment.clone(rng)
    result = take_step(environment, action, key=key, limits=limits)
    return (_pickled(environment, key), environment.fingerprint()), result


def _pickled(environment: object, key: str) -> bytes:
    try:
        return pickle.dumps(environment)
    except Exception as error:  # a class's own pickling may raise anything
        problem = f"an environment of a worker process cannot be pickled: {kind_and_text(error)}"
        remedy = "Keep locks, sockets and handles outside it (open them in step), or set processes: 0."
        raise TargetError(problem, code="environment-not-pickled", key=key, remedy=remedy) from error
