"""Environments of gymnasium's form, ``reset(seed=, options=)`` and ``step(action)``, as environments of ours.

They need neither ``clone`` nor ``fingerprint``. A clone is a deep copy that samples from a generator of its own
(gymnasium's ``np_random``). Where no deep copy can be made, a new environment replays the actions from the same seed.
"""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from rollmatch.errors import TargetError
from rollmatch.records import Sample

_MAX_SEED = 2**31
_NO_COPY = (TypeError, AttributeError, NotImplementedError, RecursionError, pickle.PicklingError)
"""What ``copy.deepcopy`` raises for sockets, locks, generators and handles of simulators."""


class GymnasiumLike(Protocol):
    """gymnasium's ``Env``, with texts as observations and actions."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin; return the first observation and more, which is ignored."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return observation, reward, terminated, truncated and more, which is ignored."""


def is_gymnasium_like(made: object) -> bool:
    """Whether it has ``step``, and a ``reset`` that takes ``seed`` by name; ours takes a sample and a generator."""
    reset = getattr(made, "reset", None)
    if not callable(reset) or not callable(getattr(made, "step", None)):
        return False
    return "seed" in inspect.signature(reset).parameters


class GymnasiumEnvironment:
    """One of them, made by ``make``; satisfies ``Environment``."""

    _seed: int
    _options: dict[str, Any]

    def __init__(self, make: Callable[[], GymnasiumLike]) -> None:
        self._make, self._inner = make, make()
        self._history: tuple[tuple[str | None, object], ...] = ()
        """(action, observation) since the beginning; the first action is None."""

    def reset(self, sample: Sample, rng: np.random.Generator) -> str:
        """Begin with a seed of ``rng`` and the sample's metadata as options."""
        self._seed, self._options = int(rng.integers(_MAX_SEED)), dict(sample.metadata)
        self._history = ()
        return self._begin()

    def step(self, action: str) -> tuple[str, float, bool, bool]:
        """As gymnasium's, without the fifth part."""
        observation, reward, terminated, truncated, *_ = self._inner.step(action)
        self._history += ((action, observation),)
        return observation, reward, terminated, truncated

    def clone(self, rng: np.random.Generator) -> "GymnasiumEnvironment":
        """A deep copy, or a replay. Errors: ``replay-differs``."""
        twin = copy.copy(self)
        try:
            twin._inner = copy.deepcopy(self._inner)
        except _NO_COPY:
            twin._inner = self._make()
            twin._replay()
            return twin
        if hasattr(twin._inner, "np_random"):
            twin._inner.np_random = rng
        return twin

    def fingerprint(self) -> tuple[object, ...]:
        """Seed, actions and observations so far."""
        return self._seed, *((action, str(observation)) for action, observation in self._history)

    def _begin(self) -> str:
        observation, _ = self._inner.reset(seed=self._seed, options=self._options)
        self._history += ((None, observation),)
        return observation

    def _replay(self) -> None:
        history, self._history = self._history, ()
        for action, observation in history:
            again = self._begin() if action is None else self.step(action)[0]
            if again != observation:
                problem = f"{again!r} after {action!r}, where {observation!r} was shown before"
                remedy = "Let its chance depend on the seed alone, or make it so that copy.deepcopy can copy it."
                raise TargetError(problem, code="replay-differs", key="custom.extra.environment.name", remedy=remedy)
