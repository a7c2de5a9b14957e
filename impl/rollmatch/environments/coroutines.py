"""Environments whose ``reset`` and ``step`` are coroutines: a call that takes too long is cancelled."""

import copy
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from rollmatch.environments.limits import EnvironmentLimits, run_limited
from rollmatch.records import Sample


class CoroutineEnvironment:
    """One of them, made by ``make``; satisfies ``Environment``. ``clone`` and ``fingerprint`` are plain methods."""

    def __init__(self, make: Callable[[], Any], limits: EnvironmentLimits) -> None:
        self._inner, self._limits = make(), limits

    def reset(self, sample: Sample, rng: np.random.Generator) -> str:
        """Begin. Errors: ``EpisodeFailed``."""
        observation: str = run_limited(self._inner.reset(sample, rng), self._limits)
        return observation

    def step(self, action: str) -> tuple[str, float, bool, bool, *tuple[Any, ...]]:
        """As the protocol. Errors: ``EpisodeFailed``."""
        answer: tuple[str, float, bool, bool, *tuple[Any, ...]] = run_limited(self._inner.step(action), self._limits)
        return answer

    def instance(self) -> object:
        """One of ``environments`` of TRL's reward functions; None without a class of tools. Errors: as ``step``."""
        if not hasattr(self._inner, "instance"):
            return None
        found: object = run_limited(self._inner.instance(), self._limits)
        return found

    def clone(self, rng: np.random.Generator) -> "CoroutineEnvironment":
        """A clone of the inner one."""
        twin = copy.copy(self)
        twin._inner = self._inner.clone(rng)
        return twin

    def fingerprint(self) -> Hashable:
        """The inner one's."""
        mark: Hashable = self._inner.fingerprint()
        return mark
