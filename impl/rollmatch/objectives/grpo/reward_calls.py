"""How a reward function is called, which its signature decides. Needs no torch.

| form | signature | called |
|---|---|---|
| ours | ``(answer: str, sample: Sample) -> float`` | once per completion |
| TRL's | ``(completions, prompts, **columns) -> list[float | None]`` | once per batch |
| verifiers' | any of ``prompt, completion, answer, state, task, info``, by name | once per completion |

Columns are the keys of the samples' metadata; TRL's functions also get what ``OFFERED`` lists. Completions are texts
for samples with a ``prompt``, and lists of one message for samples with ``messages``, as in TRL. Coroutine functions
run for all completions at the same time, others one after the other in this process, or in worker processes.
Sources: TRL 1.10 ``trainer/grpo_trainer.py``, verifiers 0.1.9 ``rubrics/rubric.py``.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import fmean
from types import MappingProxyType
from typing import Literal

from rollmatch.environments.event_loop import run_coroutine
from rollmatch.environments.worker_processes import Arguments, WorkerProcesses
from rollmatch.errors import ConfigError, TargetError
from rollmatch.records import Sample

Form = Literal["ours", "trl", "verifiers"]
Value = float | None | Exception
"""None: the function says nothing about this completion."""
NAMED = ("prompt", "completion", "answer", "state", "task", "info")
OFFERED = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL passes to its functions beside texts and columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What TRL's functions write down beside their values, of N completions."""

    num_completions: int
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[object]] = field(default_factory=dict)

    @property
    def offered(self) -> dict[str, object]:
        """The two functions, by TRL's names."""
        return {"log_metric": self.log_metric, "log_extra": self.log_extra}

    def log_metric(self, name: str, value: float) -> None:
        """A figure of these completions; the step's is the mean over all of its completions."""
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Iterable[object]) -> None:
        """One value a completion, shown beside it. Errors: ``reward-count-wrong``."""
        listed = list(values)
        if len(listed) != self.num_completions:
            problem = f"log_extra({column!r}) got {len(listed)} values for {self.num_completions} completions"
            raise TargetError(problem, code="reward-count-wrong", remedy="Pass a list with one value each.")
        self.columns[column] = listed

    def of(self, place: int) -> tuple[dict[str, float], dict[str, object]]:
        """Metrics and columns of one completion.

        >>> notes = Notes(num_completions=2)
        >>> notes.log_metric("right", 0.5)
        >>> notes.log_extra("read", [4, None])
        >>> notes.of(0), notes.of(1)
        (({'right': 0.5}, {'read': 4}), ({'right': 0.5}, {'read': None}))
        """
        metrics = {name: fmean(values) for name, values in self.metrics.items()}
        return metrics, {name: values[place] for name, values in self.columns.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """A function and how to call it."""

    function: Callable[..., object]
    form: Form
    objects: Mapping[str, object] = field(default_factory=dict)
    """Further arguments by name, such as the parser of a rubric."""
    timeout_s: float | None = None
    """Of one call of a coroutine function."""
    processes: WorkerProcesses | None = None

    def __call__(
        self, answers: Sequence[str], samples: Sequence[Sample], offered: Mapping[str, object] | None = None
    ) -> list[Value]:
        """[N] a value or the exception of each completion. ``offered``: ``OFFERED``, for functions of TRL's form."""
        if self.form == "trl":
            return self._call_once(answers, samples, offered or {})
        pairs = zip(answers, samples, strict=True)
        return self._run([self._arguments(answer, sample) for answer, sample in pairs])  # type: ignore[return-value]

    def _run(self, calls: Sequence[Arguments]) -> list[object]:
        if inspect.iscoroutinefunction(self.function):
            return run_coroutine(self._gather(calls))
        if self.processes is not None:
            return [self._named(found) for found in self.processes.map(self.function, calls)]
        return [self._try(arguments, named) for arguments, named in calls]

    def _arguments(self, answer: str, sample: Sample) -> Arguments:
        if self.form == "ours":
            return (answer, sample), {}
        return (), accepted_by(self.function, {**state_of(answer, sample), **self.objects})

    def _call_once(
        self, answers: Sequence[str], samples: Sequence[Sample], offered: Mapping[str, object]
    ) -> list[Value]:
        if self.processes is not None:  # functions and environments of this process cannot be called from another
            offered = {name: value for name, value in offered.items() if not callable(value) and name != "environments"}
        arguments = accepted_by(self.function, {**columns_of(answers, samples), **offered, **self.objects})
        [found] = self._run([((), arguments)])
        if isinstance(found, Exception):
            return [found] * len(answers)
        values: list[Value] | None = None
        if isinstance(found, Iterable) and not isinstance(found, str | bytes | Mapping | Set):
            values = list(found)  # also of an array or a tensor
        if values is None or len(values) != len(answers):
            made = f"a {type(found).__name__}" if values is None else f"{len(values)} values"
            problem = f"returned {made} for {len(answers)} completions"
            return [
                TargetError(problem, code="reward-count-wrong", remedy="Return a list with one number each.")
            ] * len(answers)
        return values

    async def _gather(self, calls: Sequence[Arguments]) -> list[object]:
        async def run(arguments: Sequence[object], named: Mapping[str, object]) -> object:
            made = self.function(*arguments, **named)
            assert isinstance(made, Awaitable)
            return await asyncio.wait_for(made, self.timeout_s)

        found = await asyncio.gather(*(run(*call) for call in calls), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, Exception):
                raise each
        return found

    def _named(self, found: object) -> object:
        """A call that was ended, by an error of ours."""
        if not isinstance(found, TimeoutError) or self.timeout_s is None:
            return found
        problem, remedy = f"no value within {self.timeout_s:g} s", "Raise timeout_s, or make it faster."
        return TargetError(problem, code="reward-timeout", remedy=remedy)

    def _try(self, arguments: Sequence[object], named: Mapping[str, object]) -> object:
        try:
            return self.function(*arguments, **named)
        except SystemExit as error:
            return RuntimeError(f"SystemExit: {error}")
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything; it costs this call only
            return error


def form_of(
    function: Callable[..., object],
    name: str,
    *,
    key: str,
    objects: Sequence[str] = (),
    withheld: Mapping[str, str] = MappingProxyType({}),
) -> Form:
    """How to call a function. ``withheld``: of ``OFFERED``, what it does not get, and why.

    Errors: ``ConfigError`` with ``reward-signature``.

    >>> form_of(lambda answer, sample: 1.0, "f", key="x"), form_of(lambda completions, **columns: [], "f", key="x")
    ('ours', 'trl')
    >>> form_of(max, "f", key="x")
    'ours'
    >>> form_of(lambda completion, answer, **others: 1.0, "f", key="x")
    'verifiers'
    >>> form_of(lambda completion_ids=None, **others: [], "f", key="x"), form_of(lambda **all_of_them: [], "f", key="x")
    ('trl', 'trl')
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return "ours"
    parameters = signature.parameters
    required = {
        each for each, one in parameters.items() if one.default is one.empty and one.kind not in (one.VAR_KEYWORD,)
    }
    if missing := sorted(required & withheld.keys()):
        problem = f"{name}{signature} needs {', '.join(missing)}, and {withheld[missing[0]]}"
        raise ConfigError(problem, code="reward-signature", key=key, remedy="Give these parameters a default of None.")
    takes_all = {one.kind for one in parameters.values()} == {inspect.Parameter.VAR_KEYWORD}
    if takes_all or parameters.keys() & {"completions", "prompts"} or (required or parameters.keys()) & set(OFFERED):
        return "trl"
    if parameters.keys() & set(NAMED) - {"answer"} and required <= {*NAMED, *objects}:
        return "verifiers"
    try:
        signature.bind("answer", "sample")
    except TypeError as error:
        raise _misfit(f"{name}{signature} cannot be called: {error}", key) from error
    return "ours"


def _misfit(problem: str, key: str) -> ConfigError:
    remedy = (
        "Write it as function(answer: str, sample: Sample) -> float, as TRL's function(completions, **columns) "
        "-> list, or as verifiers' function(completion, answer, **others) -> float."
    )
    return ConfigError(problem, code="reward-signature", key=key, remedy=remedy)


def accepted_by(function: Callable[..., object], offered: Mapping[str, object]) -> dict[str, object]:
    """What is offered, without what the function has no parameter for.

    >>> accepted_by(lambda completions, solution: [], {"completions": [], "solution": [], "level": []})
    {'completions': [], 'solution': []}
    """
    parameters = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def state_of(answer: str, sample: Sample) -> dict[str, object]:
    """Arguments of verifiers' functions for one completion; ``state`` is a dict of the others."""
    fields = {
        "prompt": _prompt_of(sample),
        "completion": _completion_of(answer, sample),
        "answer": sample.metadata.get("answer", ""),
        "task": sample.metadata.get("task", "default"),
        "info": sample.metadata.get("info", {}),
    }
    return fields | {"state": dict(fields)}


def columns_of(answers: Sequence[str], samples: Sequence[Sample]) -> dict[str, object]:
    """Arguments of TRL's functions, lists of [N]: prompts, completions, and every other key of the metadata.

    >>> first = Sample(sample_id=0, origin="x:1", images=(), metadata={"sum": 4})
    >>> second = Sample(sample_id=1, origin="x:2", images=(), metadata={})
    >>> columns_of(["a", "b"], [first, second])["sum"]
    [4, None]
    """
    states = [state_of(answer, sample) for answer, sample in zip(answers, samples, strict=True)]
    groups = {f"{name}s": [state[name] for state in states] for name in NAMED}
    keys = {key: None for sample in samples for key in sample.metadata if key not in ("prompts", "completions")}
    return groups | {key: [sample.metadata.get(key) for sample in samples] for key in keys}


def _prompt_of(sample: Sample) -> object:
    if sample.has_text_prompt:
        return sample.messages[-1][1]
    return sample.chat()


def _completion_of(answer: str, sample: Sample) -> object:
    return answer if sample.has_text_prompt else [{"role": "assistant", "content": answer}]
