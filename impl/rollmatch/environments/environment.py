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
Those of verifiers are played as they are: see ``verifiers_like``.
"""

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import NamedTuple, Protocol

import numpy as np

from rollmatch.config.named import load_named
from rollmatch.environments.gymnasium_like import GymnasiumEnvironment, is_gymnasium_like
from rollmatch.environments.verifiers_like import (
    OncePerProcess,
    VerifiersEnvironment,
    is_verifiers_like,
    is_verifiers_v1,
)
from rollmatch.errors import ConfigError, TargetError
from rollmatch.records import Sample

METHODS = ("reset", "clone", "step", "fingerprint")


class EnvironmentUnknown(ConfigError):
    """An environment is not named as module:Class, or cannot be imported."""

    code = "environment-unknown"


class ActionUnparsable(TargetError):
    """The policy's turn is not an action. Raised by environments; it ends the episode."""

    code = "action-unparsable"


class Environment(Protocol):
    """An environment of one sample: it replies to each turn of the policy and gives the rewards."""

    def reset(self, sample: Sample, rng: np.random.Generator) -> str:
        """Start an episode; return the first observation, which is appended to the prompt."""

    def clone(self, rng: np.random.Generator) -> "Environment":
        """Return an independent copy that samples from ``rng``."""

    def step(self, action: str) -> tuple[str, float, bool, bool]:
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


def load_environment(name: str, options: Mapping[str, object], *, key: str) -> MakeEnvironment:
    """Import ``module:Class``; modules of the working directory are found, too. It is made once, to see that it can be.

    Classes of gymnasium's and verifiers' forms are wrapped. Errors: ``EnvironmentUnknown``, ``environment-misfit``.
    """
    named = load_named(name, key=key, kind="Class", refuse=EnvironmentUnknown)
    make = partial(named, **options)
    _refuse_v1(name, named, key=key)
    remedy = "It is made as Class(**options), and has reset, clone, step and fingerprint, or gymnasium's methods."
    try:
        made = make()
    except Exception as error:  # the user's code may raise anything; the cause is kept
        raise ConfigError(
            f"{name}: {type(error).__name__}: {error}", code="environment-misfit", key=key, remedy=remedy
        ) from error
    _refuse_v1(name, made, key=key)
    if is_gymnasium_like(made):
        return partial(GymnasiumEnvironment, make)
    if is_verifiers_like(made):
        return partial(VerifiersEnvironment, OncePerProcess(make))
    missing = [method for method in METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(f"{name} has no {', '.join(missing)}", code="environment-misfit", key=key, remedy=remedy)
    return make


def _refuse_v1(name: str, made: object, *, key: str) -> None:
    if is_verifiers_v1(made):
        version = import_module("verifiers").__version__
        problem = f"{name} is of verifiers.v1 (verifiers {version}), whose harness runs a whole rollout by itself"
        remedy = "Name an environment of verifiers 0.1.x, or let verifiers roll out against /v1 of rollmatch serve."
        raise ConfigError(problem, code="environment-misfit", key=key, remedy=remedy)


def generator_of(*values: object) -> np.random.Generator:
    """Random numbers that depend on these values (run seed, sample, attempt) and nothing else.

    >>> generator_of(7, 0, "3.0.1").random() == generator_of(7, 0, "3.0.1").random()
    True
    """
    words = np.frombuffer(hashlib.blake2b(repr(values).encode(), digest_size=16).digest(), dtype="<u4")
    return np.random.default_rng(words.tolist())


def begin(make: MakeEnvironment, sample: Sample, *, run_seed: int) -> tuple[Environment, str]:
    """An environment at its beginning, and what it shows; the same whenever it is begun for a sample of a run.

    Errors: ``environment-failed``, ``observation-not-text``, ``clone-differs``.
    """
    made = make()
    with _Telling(sample.origin, "reset"):
        observation = made.reset(sample, generator_of(run_seed, sample.sample_id))
        twin = made.clone(generator_of())
        alike = made.fingerprint() == twin.fingerprint()
    if not isinstance(observation, str):
        raise TargetError(
            f"reset returned {observation!r}", code="observation-not-text", key=sample.origin, remedy="Return a text."
        )
    if not alike:
        problem = f"{twin.fingerprint()!r} was cloned from {made.fingerprint()!r}"
        raise TargetError(problem, code="clone-differs", key=sample.origin, remedy="Copy the whole state in clone.")
    return made, observation


def show(
    make: MakeEnvironment, sample: Sample, *, run_seed: int, asked: Sequence[tuple[str, str]] = (("user", ""),)
) -> Sample:
    """The sample, with what its environment shows first in a line of its own at the end of its last message.

    ``asked`` are the messages of samples that bring none. Errors: those of ``begin``.
    """
    _, observation = begin(make, sample, run_seed=run_seed)
    *before, (role, text) = sample.messages or asked
    shown = "\n".join(part for part in (text, observation) if part)
    return replace(sample, messages=(*before, (role, shown)))


def take_step(environment: Environment, action: str, *, key: str) -> StepResult:
    """One step, its answer checked. Errors: ``ActionUnparsable``, ``environment-failed``, ``step-malformed``."""
    with _Telling(key, f"step({action!r})"):
        outcome = environment.step(action)
    parts = outcome if isinstance(outcome, tuple | list) and len(outcome) >= 4 else (None,) * 4
    observation, reward, *ends = parts[:4]
    is_number = isinstance(reward, int | float | np.number) and math.isfinite(float(reward))
    if not isinstance(observation, str) or not is_number or not all(isinstance(end, bool | np.bool_) for end in ends):
        remedy = "Return (observation, reward, terminated, truncated): a text, a finite number, two truth values."
        raise TargetError(f"step({action!r}) returned {outcome!r}", code="step-malformed", key=key, remedy=remedy)
    return StepResult(observation, float(reward), bool(ends[0]), bool(ends[1]))


class _Telling:
    """Names the sample and the call that an environment failed in."""

    def __init__(self, key: str, call: str) -> None:
        self.key, self.call = key, call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, ActionUnparsable):
            problem = f"{self.call}: {type(error).__name__}: {error}"
            remedy = "Correct the environment; it refuses what is no action by ActionUnparsable."
            raise TargetError(problem, code="environment-failed", key=self.key, remedy=remedy) from error
