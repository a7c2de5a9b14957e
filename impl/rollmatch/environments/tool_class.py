"""A class whose methods are tools, with a state for each episode: what TRL's ``environment_factory`` makes.

::

    class Counter:
        def reset(self, **columns):           # of the sample -> None, or a text that stands behind its prompt
            self.count = 0

        def add(self, number: int) -> int:    # public methods are tools, described as functions are
            \"\"\"
            Add a number.

            Args:
                number: What to add.
            \"\"\"
            self.count += number
            return self.count

        def get_reward(self) -> float:        # optional: rollmatch.rewards.environments:get_reward calls it
            return float(self.count == 10)

An instance is made without arguments, used by one episode at a time, and used again by later ones. Reward functions
get the instances of the episodes that they judge as ``environments``. Source: TRL 1.16 ``trainer/grpo_trainer.py``.
There each episode of a group may begin otherwise; here all have the prompt of their sample. So that ``reset`` shows the
same to each of them, ``random`` and ``numpy.random`` are seeded while it runs.
"""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any

import numpy as np

from rollmatch.errors import ConfigError, TargetError, kind_and_text
from rollmatch.records import Sample

NOT_TOOLS = ("reset", "get_reward")
_RESETS = 3
"""Most tries to see what was shown: another thread may draw from the seeded generators."""
_SEEDED = RLock()


class ToolFactory:
    """Marks a function that makes instances; a plain function is a tool."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.make = make


class ToolClass:
    """One class with its idle instances; the first is made at once. Errors: ``tool-class-misfit``."""

    def __init__(self, make: Callable[[], Any], *, key: str) -> None:
        self._make, self._lock = make, Lock()
        remedy = "It is made without arguments, and has reset(**columns), which returns None or a text."
        try:
            probe = make()
        except Exception as error:  # the user's code may raise anything; the cause is kept
            raise ConfigError(kind_and_text(error), code="tool-class-misfit", key=key, remedy=remedy) from error
        if not inspect.isfunction(getattr(type(probe), "reset", None)):
            problem = f"{type(probe).__name__} has no method reset"
            raise ConfigError(problem, code="tool-class-misfit", key=key, remedy=remedy)
        self._idle = [probe]
        self.methods: Mapping[str, Callable[..., object]] = {
            name: getattr(probe, name)
            for name, _ in inspect.getmembers(type(probe), predicate=inspect.isfunction)
            if name not in NOT_TOOLS and not name.startswith("_")
        }
        """Of the first instance."""
        self.has_reward = inspect.isfunction(getattr(type(probe), "get_reward", None))
        self._shown: dict[tuple[str, int], tuple[Mapping[str, object], str]] = {}

    def first_shown(self, sample: Sample, seed: int) -> str:
        """What ``reset`` shows for a sample. Errors: ``replay-differs``, and what it raises.

        The first sample's is seen twice, so that a ``reset`` that shows what it wants is found before a run.
        """
        known = self._shown.get((sample.origin, seed))
        if known is None:
            known = _columns_of(sample), self._see(_columns_of(sample), seed)
            is_first = not self._shown
            self._shown[sample.origin, seed] = known
            if is_first:
                Session(self, sample, seed)
        return known[1]

    def _see(self, columns: Mapping[str, object], seed: int) -> str:
        instance = self.take()
        try:
            return _reset(instance, columns, seed)
        finally:
            self.give(instance)

    def begin(self, instance: Any, sample: Sample, seed: int) -> None:
        """Reset an instance as the sample's prompt says. Errors: as ``first_shown``."""
        self.first_shown(sample, seed)
        columns, shown = self._shown[sample.origin, seed]
        for _ in range(_RESETS):
            if (seen := _reset(instance, columns, seed)) == shown:
                return
        problem = f"reset showed {seen!r:.200}, where the prompt says {shown!r:.200}"
        remedy = "Let reset depend on the sample's columns and on random and numpy.random, which are seeded."
        raise TargetError(problem, code="replay-differs", key="custom.extra.environment.tools", remedy=remedy)

    def take(self) -> Any:
        """An instance that no episode uses."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._make()

    def give(self, instance: Any) -> None:
        """Let others use it."""
        with self._lock:
            self._idle.append(instance)


class Session:
    """An instance during an episode; others may use it when nothing refers to the session."""

    def __init__(self, of: ToolClass, sample: Sample, seed: int) -> None:
        self._of, self.instance = of, of.take()
        of.begin(self.instance, sample, seed)

    def __del__(self) -> None:
        if hasattr(self, "instance"):
            self._of.give(self.instance)


def _columns_of(sample: Sample) -> dict[str, object]:
    prompt: object = sample.messages[-1][1] if sample.has_text_prompt else sample.chat()
    return {"prompt": prompt, **sample.metadata}


def _reset(instance: Any, columns: Mapping[str, object], seed: int) -> str:
    with _seeded(seed):
        shown = instance.reset(**columns)
    return "" if shown is None else shown


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """One at a time; the generators are afterwards as they were."""
    with _SEEDED:
        before = random.getstate(), np.random.get_state()  # what users' code draws from
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
