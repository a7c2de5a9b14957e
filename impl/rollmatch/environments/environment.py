"""What answers a policy turn by turn: plain classes, named in the configuration. Needs no torch.

An environment takes no arguments but its options, keeps nothing outside itself, and can be pickled::

    class Coin:
        def reset(self, sample, rng):           # -> first observation, put at the end of the sample's prompt
            self.rng, self.flips = rng, 0
            return "heads or tails?"

        def clone(self, rng):                   # continues exactly as this one would with the same generator
            twin = Coin()
            twin.rng, twin.flips = rng, self.flips
            return twin

        def step(self, action):                 # -> observation, reward, terminated, truncated
            if action not in ("heads", "tails"):
                raise ActionUnparsable(f"{action!r} is neither heads nor tails")
            self.flips += 1
            return "again?", float(action == self.rng.choice(["heads", "tails"])), self.flips == 3, False

        def fingerprint(self):                  # numbers and texts that distinguish its states
            return self.flips

``reset`` and ``step`` are gymnasium's, with a sample in place of options and texts in place of arrays; what stands
after the fourth part of a step's answer (gymnasium's ``info``) is ignored. ``reset`` is given the same generator for
every attempt at a sample, so that all of them have one prompt; after it each attempt continues with a clone of its own.
Classes with gymnasium's own ``reset(seed=, options=)`` need no ``clone`` and ``fingerprint``: see ``gymnasium_like``.
Those of verifiers are played as they are: see ``verifiers_like``. Several environments are called at the same time,
each from one thread at a time.
"""

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from reprlib import Repr
from textwrap import shorten
from typing import Any, NamedTuple, Protocol

import numpy as np

from rollmatch.environments.limits import DEFAULTS, EnvironmentLimits, EpisodeFailed, check_observation
from rollmatch.errors import RollmatchError, TargetError
from rollmatch.records import Sample


class ActionUnparsable(TargetError):
    """The policy's turn is not an action. Raised by environments; it ends the episode."""

    code = "action-unparsable"


class Environment(Protocol):
    """An environment of one sample: it replies to each turn of the policy and gives the rewards."""

    def reset(self, sample: Sample, rng: np.random.Generator) -> str:
        """Start an episode; return the first observation, which is appended to the prompt."""

    def clone(self, rng: np.random.Generator) -> "Environment":
        """Return an independent copy that samples from ``rng``."""

    def step(self, action: str) -> tuple[str, float, bool, bool, *tuple[Any, ...]]:
        """Apply a turn's text; return observation, reward, terminated, truncated. Errors: ``ActionUnparsable``."""

    def fingerprint(self) -> Hashable:
        """Return numbers, texts or tuples that identify the state, without the generator."""


MakeEnvironment = Callable[[], Environment]


class StepResult(NamedTuple):
    """What a step led to."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    tool_seconds: tuple[tuple[str, float], ...] = ()
    """(name, seconds) of each tool that was called, in order."""


def generator_of(*values: object) -> np.random.Generator:
    """Random numbers that depend on these values (run seed, sample, attempt) and nothing else.

    >>> generator_of(7, 0, "3.0.1").random() == generator_of(7, 0, "3.0.1").random()
    True
    """
    words = np.frombuffer(hashlib.blake2b(repr(values).encode(), digest_size=16).digest(), dtype="<u4")
    return np.random.default_rng(words.tolist())


def begin(
    make: MakeEnvironment, sample: Sample, *, run_seed: int, limits: EnvironmentLimits = DEFAULTS
) -> tuple[Environment, str]:
    """An environment at its beginning, and what it shows; the same whenever it is begun for a sample of a run.

    Errors: ``EpisodeFailed``, ``observation-not-text``, ``clone-differs``.
    """
    return begin_with(make, sample, generator_of(run_seed, sample.sample_id), limits)


def begin_with(
    make: MakeEnvironment, sample: Sample, rng: np.random.Generator, limits: EnvironmentLimits
) -> tuple[Environment, str]:
    """As ``begin``, with this generator."""
    with _Telling(sample.origin, "reset"):
        made = make()
        observation = made.reset(sample, rng)
        twin = made.clone(generator_of())
        marks = made.fingerprint(), twin.fingerprint()
    if not isinstance(observation, str):
        raise TargetError(
            f"reset returned {_shown(observation)}",
            code="observation-not-text",
            key=sample.origin,
            remedy="Return a text.",
        )
    if marks[0] != marks[1]:
        problem = f"{_shown(marks[1])} was cloned from {_shown(marks[0])}"
        raise TargetError(problem, code="clone-differs", key=sample.origin, remedy="Copy the whole state in clone.")
    return made, check_observation(observation, limits, key=sample.origin)


def show(
    make: MakeEnvironment,
    sample: Sample,
    *,
    run_seed: int,
    asked: Sequence[tuple[str, str]] = (("user", ""),),
    limits: EnvironmentLimits = DEFAULTS,
) -> Sample:
    """The sample, with what its environment shows first in a line of its own at the end of its last message.

    ``asked`` are the messages of samples that bring none. Errors: those of ``begin``.
    """
    _, observation = begin(make, sample, run_seed=run_seed, limits=limits)
    *before, (role, text) = sample.messages or asked
    shown = "\n".join(part for part in (text, observation) if part)
    return replace(sample, messages=(*before, (role, shown)))


def take_step(environment: Environment, action: str, *, key: str, limits: EnvironmentLimits = DEFAULTS) -> StepResult:
    """One step, its answer checked. Errors: ``ActionUnparsable``, ``EpisodeFailed``, ``step-malformed``."""
    call = f"step({_shown(action)})"
    with _Telling(key, call):
        outcome = environment.step(action)
    if isinstance(outcome, StepResult):  # of a worker process, which has checked it
        return outcome
    parts = outcome if isinstance(outcome, tuple | list) and len(outcome) >= 4 else (None,) * 4
    observation, reward, *ends = parts[:4]
    info = parts[4] if len(parts) > 4 and isinstance(parts[4], Mapping) else {}
    is_number = isinstance(reward, int | float | np.number) and math.isfinite(float(reward))
    if not isinstance(observation, str) or not is_number or not all(isinstance(end, bool | np.bool_) for end in ends):
        remedy = "Return (observation, reward, terminated, truncated): a text, a finite number, two truth values."
        raise TargetError(f"{call} returned {_shown(outcome)}", code="step-malformed", key=key, remedy=remedy)
    shown = check_observation(observation, limits, key=key)
    return StepResult(shown, float(reward), bool(ends[0]), bool(ends[1]), tuple(info.get("tool_seconds", ())))


def take_snapshot(environment: Environment, *, key: str) -> Environment:
    """A clone that takes no step. Errors: ``EpisodeFailed``."""
    with _Telling(key, "clone"):
        return environment.clone(NO_CHANCE)


NO_CHANCE = generator_of("snapshots take no step")


class FailedEnvironment:
    """Stands for one that could not begin: its first step raises what that failed with."""

    def __init__(self, error: EpisodeFailed) -> None:
        self._error = error

    def step(self, action: str) -> StepResult:
        """Raise it."""
        raise self._error

    def reset(self, sample: Sample, rng: np.random.Generator) -> str:
        """Raise it."""
        raise self._error

    def clone(self, rng: np.random.Generator) -> "FailedEnvironment":
        """Itself."""
        return self

    def fingerprint(self) -> str:
        """What it failed with."""
        return self._error.problem


class _Telling:
    """Names the sample and the call that an environment failed in; errors of this package name them themselves."""

    def __init__(self, key: str, call: str) -> None:
        self.key, self.call = key, call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EpisodeFailed) and not error.key:
            raise EpisodeFailed(
                f"{self.call}: {error.problem}", code=error.code, key=self.key, remedy=error.remedy
            ) from error
        if isinstance(error, Exception | SystemExit) and not isinstance(error, RollmatchError):
            problem = f"{self.call}: {type(error).__name__}: {shorten(str(error), _MOST_SHOWN)}"
            remedy = "Correct the environment; it refuses what is no action by ActionUnparsable."
            raise EpisodeFailed(problem, key=self.key, remedy=remedy) from error


_MOST_SHOWN = 500
"""Characters of what an environment says."""
_repr = Repr()
_repr.maxstring = _repr.maxother = _MOST_SHOWN
_shown = _repr.repr
