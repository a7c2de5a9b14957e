"""Reward functions, environments, answer formats and callbacks that the configuration names.

Import no torch, so that ``check`` can load them.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rollmatch.config import RunConfig
from rollmatch.config.custom import EnvironmentConfig
from rollmatch.config.named import load_named
from rollmatch.environments.environment import MakeEnvironment, show
from rollmatch.environments.limits import EnvironmentLimits
from rollmatch.environments.loading import load_environment, load_tool_environment
from rollmatch.environments.tools import load_class, load_tools
from rollmatch.errors import ConfigError, ErrorList, RollmatchError, TargetError
from rollmatch.model.tool_texts import reply_text, tools_text
from rollmatch.objectives.grpo.reward import CallLimits, Reward, load_rewards_of
from rollmatch.objectives.rollout_matching.answer_format import ANSWER_FORMATS, AnswerFormat
from rollmatch.records import Sample

Loaded = TypeVar("Loaded")


class CallbackUnknown(ConfigError):
    """A callback is not named as module:class, cannot be imported, or cannot be made without arguments."""

    code = "callback-unknown"


class AnswerFormatUnknown(ConfigError):
    """An answer format is neither one of the four names nor a class that derives from ``AnswerFormat``."""

    code = "answer-format-unknown"


def load_callbacks(config: RunConfig) -> tuple[object, ...]:
    """Classes, or callbacks as they are. Errors: ``ErrorList`` of ``CallbackUnknown``."""
    return _load_each(
        partial(_load_callback, name, f"training.callbacks.{place}")
        for place, name in enumerate(config.training.callbacks)
    )


def _load_each(loads: Iterable[Callable[[], Sequence[Loaded]]]) -> tuple[Loaded, ...]:
    """What all return. Errors: ``ErrorList`` of every ``ConfigError``."""
    found: list[Loaded] = []
    errors: list[RollmatchError] = []
    for load in loads:
        try:
            found += load()
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise ErrorList(errors)
    return tuple(found)


def _load_callback(name: str, key: str) -> list[object]:
    found = load_named(name, key=key, kind="class", refuse=CallbackUnknown)
    if not any(event.startswith("on_") for event in dir(found)):
        remedy = "Name a transformers.TrainerCallback."
        raise CallbackUnknown(f"{name} has no method that begins with on_", key=key, remedy=remedy)
    if inspect.isclass(found):
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            remedy = "Derive a class that gives them, and name that."
            raise CallbackUnknown(f"{name} needs arguments: {error}", key=key, remedy=remedy) from error
    return [found]


def load_rewards(config: RunConfig) -> tuple[Reward, ...]:
    """Import them; none for an objective that has no rewards.

    Errors: ``ErrorList`` of ``RewardUnknown`` and ``reward-signature``.
    """
    if not config.custom.learns_from_completions:
        return ()
    return _load_each(
        partial(
            load_rewards_of,
            entry.function,
            key=f"custom.extra.grpo.rewards.{place}.function",
            shown=entry.shown_name,
            weight=entry.weight,
            limits=CallLimits(
                timeout_s=entry.timeout_s,
                processes=entry.processes,
                withheld=_withheld(config, processes=entry.processes),
            ),
        )
        for place, entry in enumerate(config.custom.extra.grpo.rewards)
    )


def _withheld(config: RunConfig, *, processes: int) -> dict[str, str]:
    """What TRL's reward functions do not get, and why. Errors: those of ``load_class``."""
    withheld = {}
    if config.custom.trainer_variant.startswith("vineppo"):
        reason = "VinePPO rewards continuations, too, which are not the completions of a step"
        withheld = dict.fromkeys(("trainer_state", "log_extra", "log_metric"), reason)
    elif processes:
        withheld = dict.fromkeys(("log_extra", "log_metric"), "a worker process cannot call it")
    if load_class(config.custom.extra.environment.tools) is None:
        withheld["environments"] = "no class is among custom.extra.environment.tools"
    elif processes:
        withheld["environments"] = "a worker process cannot call them"
    return withheld


def load_answer_format(name: str, *, key: str) -> AnswerFormat:
    """One of the four, or what ``module:Class`` makes without arguments. Errors: ``AnswerFormatUnknown``."""
    if name in ANSWER_FORMATS:
        return ANSWER_FORMATS[name]
    made = load_named(name, key=key, kind="Class", refuse=AnswerFormatUnknown)
    made = made() if callable(made) else made
    if not isinstance(made, AnswerFormat):
        remedy = "Derive the class from rollmatch.AnswerFormat; it is made without arguments."
        raise AnswerFormatUnknown(f"{name} makes no AnswerFormat", key=key, remedy=remedy)
    return made


def load_configured_format(config: RunConfig) -> AnswerFormat:
    """What ``answer_format`` names. Errors: ``AnswerFormatUnknown``."""
    key = "custom.extra.rollout_matching.answer_format"
    return load_answer_format(config.custom.extra.rollout_matching.answer_format, key=key)


def needs_coord_tokens(config: RunConfig) -> bool:
    """Whether the model's vocabulary must hold the coordinate tokens. Errors: ``AnswerFormatUnknown``."""
    return config.custom.detects and load_configured_format(config).uses_tokens


def load_configured_environment(config: RunConfig) -> MakeEnvironment | None:
    """What makes environments; None where none is named. Errors: those of ``load_environment`` and ``load_tools``."""
    entry = config.custom.extra.environment
    if entry.tools:
        return load_tool_environment(entry.tools, limits=limits_of(entry))
    if entry.name is None:
        return None
    key = "custom.extra.environment.name"
    return load_environment(entry.name, entry.options, key=key, limits=limits_of(entry))


def shown_schemas(config: RunConfig) -> tuple[Mapping[str, Any], ...]:
    """Schemas of the tools that the chat template describes. Errors: those of ``load_tools``."""
    entry = config.custom.extra.environment
    return tuple(tool.schema for tool in load_tools(entry.tools).values()) if entry.show_tools == "template" else ()


def first_reply(config: RunConfig) -> str:
    """An observation as the environment may write it, for trying the chat template: some know replies of tools."""
    return reply_text({"role": "tool", "content": "?"}) if config.custom.extra.environment.tools else ""


def _with_tools(config: RunConfig, sample: Sample) -> Sample:
    """A sample that shows the tools: for its chat template, or as text in its system message."""
    entry = config.custom.extra.environment
    schemas = tuple(tool.schema for tool in load_tools(entry.tools).values())
    if not schemas or entry.show_tools == "template":
        return replace(sample, tools=(*sample.tools, *schemas))
    (first_role, first), fields = sample.messages[0], sample.message_fields
    if first_role == "system":
        return replace(sample, messages=(("system", f"{first}\n\n{tools_text(schemas)}"), *sample.messages[1:]))
    messages = (("system", tools_text(schemas)), *sample.messages)
    return replace(sample, messages=messages, message_fields=({}, *fields) if fields else ())


def limits_of(entry: EnvironmentConfig) -> EnvironmentLimits:
    """Of each call of an environment."""
    return EnvironmentLimits(
        timeout_s=entry.call_timeout_s,
        processes=entry.processes,
        max_observation_bytes=entry.max_observation_bytes,
    )


def with_first_observations(config: RunConfig, samples: Sequence[Sample]) -> Sequence[Sample]:
    """Samples with what their environments show first; as they are where there is no environment.

    Errors: ``ErrorList`` of what environments could not begin with.
    """
    make = load_configured_environment(config)
    if make is None:
        return samples
    prompts = config.custom.prompts
    system = (("system", prompts.system),) if prompts.system else ()
    prompt = (*system, ("user", prompts.user))
    limits = limits_of(config.custom.extra.environment)
    shown: list[Sample] = []
    errors: list[TargetError] = []
    for sample in samples:
        try:
            begun = show(make, sample, run_seed=config.training.seed, asked=prompt, limits=limits)
            shown.append(_with_tools(config, begun))
        except TargetError as error:
            errors.append(error)
    if errors:
        raise ErrorList(errors)
    return shown
