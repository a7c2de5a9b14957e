"""Environments of verifiers 0.1.x (``MultiTurnEnv``) as environments of ours. Source: 0.1.9 ``envs/multiturn_env.py``.

The prompt is the sample's; ``answer``, ``info`` and ``task`` come from its metadata. Turns of an environment with tools
(``ToolEnv``) are read for tool calls: see ``tool_texts``. The rubric scores the whole episode at its end.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np

from rollmatch.environments.limits import EnvironmentLimits, run_limited
from rollmatch.errors import TargetError
from rollmatch.model.tool_texts import called_message, reply_text, tools_text
from rollmatch.records import Sample

_METHODS = ("init_state", "setup_state", "is_completed", "get_prompt_messages", "add_trajectory_step")
_FIELDS = ("rubric", "oai_tools")
_OF_ROWS = ("answer", "info", "task")
Message = Mapping[str, Any]


def is_verifiers_v1(made: object) -> bool:
    """Whether it is of verifiers' later API, whose harnesses call a model by URL and cannot be played turn by turn."""
    kind = made if isinstance(made, type) else type(made)
    return any(base.__module__.split(".")[:2] == ["verifiers", "v1"] for base in kind.__mro__)


def is_of_verifiers(made: object) -> bool:
    """Whether it is of verifiers, of any version."""
    return any(base.__module__.partition(".")[0] == "verifiers" for base in type(made).__mro__)


def is_verifiers_like(made: object) -> bool:
    """Whether it can be played turn by turn as a ``MultiTurnEnv``."""
    return all(hasattr(made, name) for name in (*_METHODS, *_FIELDS))


class OncePerProcess:
    """Makes one environment for all episodes: verifiers keeps an episode's state outside. Pickled as its recipe.

    ``made``: the one of this process, where it was made. Only a main thread can make it: it sets signal handlers.
    """

    def __init__(self, make: Callable[[], Any], made: Any = None) -> None:
        self._make, self._made = make, made

    def __call__(self) -> Any:
        """The environment."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def __reduce__(self) -> tuple[type["OncePerProcess"], tuple[Callable[[], Any]]]:
        return OncePerProcess, (self._make,)


class VerifiersEnvironment:
    """An episode of the environment that ``make`` returns; satisfies ``Environment``."""

    def __init__(self, make: OncePerProcess, limits: EnvironmentLimits) -> None:
        self._make, self._limits = make, limits
        self._state: Any = None
        self._messages: list[Message] = []
        """What the policy has read before its turn."""
        self._history: tuple[str, ...] = ()

    def reset(self, sample: Sample, rng: np.random.Generator) -> str:
        """Begin; the environment's tools are shown, and what ``setup_state`` adds to the prompt."""
        prompt = sample.chat()
        known = {name: sample.metadata[name] for name in _OF_ROWS if name in sample.metadata}
        row = {"prompt": prompt, "example_id": sample.sample_id, "answer": ""} | known
        self._make()  # here: the loop of coroutines is no main thread
        self._state = run_limited(self._begin(row), self._limits)
        self._messages, self._history = list(self._state["prompt"]), (str(sample.sample_id),)
        shown = (tools_text(self._make().oai_tools or ()), self._shown(prompt))
        return "\n".join(text for text in shown if text)

    def step(self, action: str) -> tuple[str, float, bool, bool]:
        """As the protocol. Errors: whatever the environment raises, and functions of its rubric."""
        self._make()
        observation, reward, terminated, truncated = run_limited(self._advance(action), self._limits)
        self._history += (action, observation)
        return observation, reward, terminated, truncated

    def clone(self, rng: np.random.Generator) -> "VerifiersEnvironment":
        """A copy with a state of its own; its chance is the environment's."""
        twin = copy.copy(self)
        twin._state = copy.deepcopy(self._state)
        return twin

    def fingerprint(self) -> tuple[str, ...]:
        """Sample, actions and observations so far."""
        return self._history

    async def _begin(self, row: dict[str, Any]) -> Any:
        env = self._make()
        return await env.setup_state(await env.init_state(row, None, "", None))

    async def _advance(self, action: str) -> tuple[str, float, bool, bool]:
        env, state = self._make(), self._state
        written = called_message(action) if env.oai_tools else {"role": "assistant", "content": action}
        step = {"prompt": self._messages, "completion": [written], "trajectory_id": state["trajectory_id"]}
        unknown = dict.fromkeys(("response", "tokens", "reward", "advantage"))
        await env.add_trajectory_step(state, unknown | step | {"is_truncated": False, "extras": {}})
        if not await env.is_completed(state):
            before, messages = [*self._messages, written], list(await env.get_prompt_messages(state))
            if state.get("final_env_response") is None:
                self._messages = messages
                return self._shown(before), 0.0, False, False
            await env.is_completed(state)
        await env.render_completion(state)
        with _failures_of_rubrics():
            await env.rubric.score_rollout(state, nullcontext())
        is_cut = state.get("stop_condition") == "max_turns_reached"
        return "", float(state["reward"]), not is_cut, is_cut

    def _shown(self, before: Sequence[Message]) -> str:
        """Texts behind ``before``."""
        if self._messages[: len(before)] != list(before):
            problem = "the environment rewrites messages that the policy has read"
            remedy = "Use an environment that appends messages, or write one with reset, clone, step and fingerprint."
            raise TargetError(
                problem, code="environment-not-linear", key="custom.extra.environment.name", remedy=remedy
            )
        return "\n".join(reply_text(message) for message in self._messages[len(before) :])


class _Kept(logging.Handler):
    """Keeps what is logged as an error while an episode is scored; others are scored at the same time."""

    def emit(self, record: logging.LogRecord) -> None:
        kept = _ERRORS.get()
        if kept is not None:
            kept.append(record.getMessage())


_ERRORS: ContextVar[list[str] | None] = ContextVar("errors of one scoring, in its coroutines", default=None)
_KEPT = _Kept(logging.ERROR)


@contextmanager
def _failures_of_rubrics() -> Iterator[None]:
    """verifiers logs what a reward function raises, and counts 0 for it: here it is raised."""
    logging.getLogger("verifiers").addHandler(_KEPT)  # without effect where it was added
    errors: list[str] = []
    token = _ERRORS.set(errors)
    try:
        yield
    finally:
        _ERRORS.reset(token)
    if errors:
        raise RuntimeError(errors[0])
