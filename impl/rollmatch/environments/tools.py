"""Tools that a turn calls: Python functions, and those of MCP servers by URL. What a turn writes: ``tool_texts``.

A function's signature and docstring (Google's style, as transformers reads them) become the JSON schema that the policy
is shown::

    def multiply(a: int, b: int) -> int:
        \"\"\"
        Multiply two numbers.

        Args:
            a: The first factor.
            b: The second factor.
        \"\"\"
        return a * b

What a function raises is what the policy reads, so that it can correct its call; an ``OSError`` (no connection, no
file, no time) is not the policy's doing and fails the episode. One class may stand among the functions: its methods are
tools with a state (``tool_class``).
"""

import asyncio
import copy
import json
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import isclass, iscoroutinefunction
from typing import Any

import numpy as np
from pydantic import ValidationError, validate_call

from rollmatch.config.named import load_named
from rollmatch.environments.event_loop import NotDone, run_coroutine
from rollmatch.environments.tool_class import Session, ToolClass, ToolFactory
from rollmatch.errors import ConfigError, TargetError, kind_and_text
from rollmatch.model.tool_texts import called_message, reply_text
from rollmatch.records import Sample

KEY = "custom.extra.environment.tools"
_SERVER_TIMEOUT_S = 20.0
"""Until an MCP server has listed its tools."""
_MAX_SEED = 2**31


class ToolUnknown(ConfigError):
    """A tool is not named as module:function or as the URL of an MCP server, or cannot be imported."""

    code = "tool-unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function that a policy may call."""

    schema: Mapping[str, Any]
    """As chat templates take it: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""
    call: Callable[..., Awaitable[object]]
    """(arguments, instance of its class or None) -> result. Errors: whatever it raises."""

    @property
    def name(self) -> str:
        """What a call names."""
        return str(self.schema["function"]["name"])


@lru_cache
def load_tools(names: tuple[str, ...]) -> Mapping[str, Tool]:
    """Name -> tool. Errors: ``ToolUnknown``, ``ConfigError`` with ``tool-undescribed``, ``tool-server-unreachable``,
    ``tool-class-misfit`` or ``tool-named-twice``.
    """
    tools: dict[str, Tool] = {}
    load_class(names)
    for place, name in enumerate(names):
        key = f"{KEY}.{place}"
        for tool in _of_server(name, key) if "://" in name else _of_module(name, key):
            if tool.name in tools:
                problem, remedy = f"two tools are called {tool.name}", "Rename one of them."
                raise ConfigError(problem, code="tool-named-twice", key=key, remedy=remedy)
            tools[tool.name] = tool
    return tools


def load_class(names: Sequence[str]) -> ToolClass | None:
    """The class among them. Errors: ``ToolUnknown``, ``ConfigError`` with ``tool-class-misfit``."""
    found = [(place, made) for place, name in enumerate(names) if (made := _class_of(name, f"{KEY}.{place}"))]
    if len(found) > 1:
        problem, remedy = "is a second class", "Name one, whose methods use the other."
        raise ConfigError(problem, code="tool-class-misfit", key=f"{KEY}.{found[1][0]}", remedy=remedy)
    return found[0][1] if found else None


@lru_cache
def _class_of(name: str, key: str) -> ToolClass | None:
    named = None if "://" in name else load_named(name, key=key, kind="function", refuse=ToolUnknown)
    if isinstance(named, ToolFactory):
        return ToolClass(named.make, key=key)
    return ToolClass(named, key=key) if isclass(named) else None


def _of_module(name: str, key: str) -> list[Tool]:
    if (of := _class_of(name, key)) is None:
        return [_described(load_named(name, key=key, kind="function", refuse=ToolUnknown), name, key)]
    return [
        _described(method, f"{name}.{own}", key, call=partial(_call_method, own)) for own, method in of.methods.items()
    ]


def _described(
    function: Callable[..., object], name: str, key: str, *, call: Callable[..., Awaitable[object]] | None = None
) -> Tool:
    from transformers.utils import get_json_schema  # a second to load

    try:
        validated = validate_call(function)
        return Tool(schema=get_json_schema(function), call=call or partial(_call, validated))
    except Exception as error:  # transformers and pydantic raise classes of their own
        problem = f"{name}: {kind_and_text(error)}"
        remedy = "Annotate its parameters, and describe it and each of them in a docstring with Args:."
        raise ConfigError(problem, code="tool-undescribed", key=key, remedy=remedy) from error


async def _call(function: Callable[..., Any], arguments: Mapping[str, Any], instance: object = None) -> object:
    if iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)


async def _call_method(name: str, arguments: Mapping[str, Any], instance: object) -> object:
    return await _call(validate_call(getattr(instance, name)), arguments)


def _of_server(url: str, key: str) -> list[Tool]:
    try:
        from rollmatch.environments.tool_servers import call_tool, tools_of
    except ImportError as error:
        problem, remedy = f"{url}: needs the package mcp 2 or newer", "pip install 'mcp>=2'"
        raise ConfigError(problem, code="tool-server-unreachable", key=key, remedy=remedy) from error
    try:
        found = run_coroutine(tools_of(url), timeout_s=_SERVER_TIMEOUT_S)
    except (ConnectionError, NotDone) as error:
        problem = str(error) or f"{url}: does not answer within {_SERVER_TIMEOUT_S:g} s"
        remedy = "Start the MCP server, and give the URL of its streamable HTTP, such as http://127.0.0.1:8000/mcp."
        raise ConfigError(problem, code="tool-server-unreachable", key=key, remedy=remedy) from error
    return [Tool(schema=_schema_of(tool), call=partial(call_tool, url, tool.name)) for tool in found]


def _schema_of(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
    return {"type": "function", "function": function}


class ToolEnvironment:
    """Answers calls of tools; a turn without a call ends the episode, and is what reward functions judge.

    ``reset``, ``step`` and ``instance`` are coroutines. It keeps what was called and answered, and an instance of the
    class among the tools; a clone replays the calls on an instance of its own. Tools are imported by their names.
    """

    _sample: Sample
    _seed: int

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._shown, self._history = "", tuple[tuple[str, str], ...]()
        """What was shown first; (turn, reply) since then."""
        self._session: Session | None = None
        load_tools(self._names)

    async def reset(self, sample: Sample, rng: np.random.Generator) -> str:
        """Begin; tools are shown in the prompt already."""
        self._sample, self._seed, self._history = sample, int(rng.integers(_MAX_SEED)), ()
        if (of := load_class(self._names)) is not None:
            self._shown = await asyncio.to_thread(of.first_shown, sample, self._seed)
        return self._shown

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run the calls of a turn, one after the other; the last part says how long each took.

        Errors: those of ``instance``.
        """
        if not (calls := called_message(action).get("tool_calls", ())):
            return "", 0.0, True, False, {}
        instance = await self.instance()
        observation, seconds = await self._reply(calls, instance)
        self._history += ((action, observation),)
        return observation, 0.0, False, False, {"tool_seconds": seconds}

    async def instance(self) -> object:
        """That of the class, as the calls left it; None without one. Errors: ``replay-differs``."""
        of = load_class(self._names)
        if of is None:
            return None
        if self._session is None:
            session = await asyncio.to_thread(Session, of, self._sample, self._seed)
            for action, observation in self._history:
                again, _ = await self._reply(called_message(action)["tool_calls"], session.instance)
                if again != observation:
                    problem = f"{again!r:.200} after {action!r:.200}, where {observation!r:.200} was shown before"
                    remedy = "Let its methods depend on reset and their arguments alone; grpo replays none."
                    raise TargetError(problem, code="replay-differs", key=KEY, remedy=remedy)
            self._session = session
        return self._session.instance

    async def _reply(self, calls: Sequence[Mapping[str, Any]], instance: object) -> tuple[str, list[tuple[str, float]]]:
        replies, seconds = [], []
        for call in calls:
            began = time.perf_counter()
            replies.append(await self._answer(instance, **call["function"]))
            seconds.append((call["function"]["name"], time.perf_counter() - began))
        return "\n".join(reply_text({"role": "tool", "content": reply}) for reply in replies), seconds

    async def _answer(self, instance: object, name: str, arguments: str) -> str:
        tools = load_tools(self._names)
        if not name:
            return f"Error: a call is a JSON object with name and arguments, not {arguments}"
        if name not in tools:
            return f"Error: there is no tool {name}; there are {', '.join(tools)}"
        try:
            given = json.loads(arguments)
            if not isinstance(given, dict):
                return f"Error: arguments are a JSON object, not {arguments}"
            result = await tools[name].call(given, instance)
        except OSError:
            raise
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            return f"Error: {'; '.join(wrong)}"
        except Exception as error:  # noqa: BLE001  # the policy reads it, and may call otherwise
            return kind_and_text(error)
        return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)

    def clone(self, rng: np.random.Generator) -> "ToolEnvironment":
        """The same calls so far; ``copy`` asks ``__getstate__``, which leaves the instance behind."""
        return copy.copy(self)

    def fingerprint(self) -> Hashable:
        """Sample, turns and replies so far."""
        return self._sample.sample_id, self._shown, self._history

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_session": None}
