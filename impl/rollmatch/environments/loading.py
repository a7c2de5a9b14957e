"""Environments as the configuration names them: what is imported, and which form it has."""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import iscoroutinefunction

from rollmatch.config.named import load_named
from rollmatch.environments.coroutines import CoroutineEnvironment
from rollmatch.environments.environment import MakeEnvironment
from rollmatch.environments.gymnasium_like import GymnasiumEnvironment, is_gymnasium_like
from rollmatch.environments.in_workers import WorkerEnvironment
from rollmatch.environments.limits import DEFAULTS, PROCESSES, TIMEOUT, EnvironmentLimits
from rollmatch.environments.tools import ToolEnvironment, load_class, load_tools
from rollmatch.environments.verifiers_like import (
    OncePerProcess,
    VerifiersEnvironment,
    is_of_verifiers,
    is_verifiers_like,
    is_verifiers_v1,
)
from rollmatch.errors import ConfigError, RollmatchError, kind_and_text

METHODS = ("reset", "clone", "step", "fingerprint")


class EnvironmentUnknown(ConfigError):
    """An environment is not named as module:Class, or cannot be imported."""

    code = "environment-unknown"


def load_environment(
    name: str, options: Mapping[str, object], *, key: str, limits: EnvironmentLimits = DEFAULTS
) -> MakeEnvironment:
    """Import ``module:Class``; modules of the working directory are found, too. It is made once, to see that it can be.

    Classes of gymnasium's and verifiers' forms, and those of coroutines, are wrapped.
    Errors: ``EnvironmentUnknown``, ``environment-misfit``, ``call-without-end``.
    """
    named = load_named(name, key=key, kind="Class", refuse=EnvironmentUnknown)
    make = partial(named, **options)
    _refuse_v1(name, named, key=key)
    remedy = "It is made as Class(**options), and has reset, clone, step and fingerprint, or gymnasium's methods."
    try:
        made = make()
    except RollmatchError:
        raise
    except Exception as error:  # the user's code may raise anything; the cause is kept
        raise ConfigError(
            f"{name}: {kind_and_text(error)}", code="environment-misfit", key=key, remedy=remedy
        ) from error
    _refuse_v1(name, made, key=key)
    missing: list[str] = []
    if is_gymnasium_like(made):
        make = partial(GymnasiumEnvironment, make)
    elif is_verifiers_like(made):
        make = partial(VerifiersEnvironment, OncePerProcess(make, made), limits)
    else:
        missing = [method for method in METHODS if not callable(getattr(made, method, None))]
    if missing and is_of_verifiers(made):
        version = import_module("verifiers").__version__
        problem = f"{name} is of verifiers {version}, whose environments keep other fields than those of 0.1.9"
        remedy = "Install verifiers==0.1.9, or let verifiers roll out against /v1 of rollmatch serve."
        raise ConfigError(problem, code="environment-misfit", key=key, remedy=remedy)
    if missing:
        raise ConfigError(f"{name} has no {', '.join(missing)}", code="environment-misfit", key=key, remedy=remedy)
    is_of_coroutines = iscoroutinefunction(getattr(made, "step", None))
    if is_of_coroutines:
        make = partial(CoroutineEnvironment, make, limits)
    if limits.processes:
        return partial(WorkerEnvironment, make, limits, (name.partition(":")[0],))
    if limits.timeout_s is not None and not (is_of_coroutines or is_verifiers_like(made)):
        raise ConfigError(
            f"is {limits.timeout_s:g}, but calls of {name} run in this process and cannot be ended",
            code="call-without-end",
            key=TIMEOUT,
            remedy="Set processes: 1 or more, write reset and step as async def, or remove it.",
        )
    return make


def load_tool_environment(names: Sequence[str], *, limits: EnvironmentLimits) -> MakeEnvironment:
    """What makes a ``ToolEnvironment``. Errors: of ``load_tools``; ``tool-class-misfit`` of a class in workers."""
    load_tools(tuple(names))
    if limits.processes and load_class(names) is not None:
        problem = f"is {limits.processes}, but instances of a class are kept in this process"
        remedy = "Set it to 0; methods that wait may be async."
        raise ConfigError(problem, code="tool-class-misfit", key=PROCESSES, remedy=remedy)
    make = partial(CoroutineEnvironment, partial(ToolEnvironment, tuple(names)), limits)
    own = (name.partition(":")[0] for name in names if "://" not in name)
    modules = ("transformers.utils.chat_template_utils", *own)  # what makes the schemas takes a second to import
    return partial(WorkerEnvironment, make, limits, modules) if limits.processes else make


def _refuse_v1(name: str, made: object, *, key: str) -> None:
    if is_verifiers_v1(made):
        version = import_module("verifiers").__version__
        problem = f"{name} is of verifiers.v1 (verifiers {version}), whose harness runs a whole rollout by itself"
        remedy = "Name an environment of verifiers 0.1.x, or let verifiers roll out against /v1 of rollmatch serve."
        raise ConfigError(problem, code="environment-misfit", key=key, remedy=remedy)
