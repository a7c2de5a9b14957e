"""Who says how likely each token of a completion should have been."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import nn

from rollmatch.dialects.vllm.client import MAX_CALLS
from rollmatch.dialects.vllm.teacher import TeacherServer
from rollmatch.errors import RolloutError
from rollmatch.learn.average import WeightAverage
from rollmatch.objectives.protocol import ObjectiveContext
from rollmatch.records import Sample, Segment, Teaching
from rollmatch.rollout.retry import Pause, call_with_retries

LOG = logging.getLogger("rollmatch.teacher")

PromptOf = Callable[[Sample], tuple[int, ...]]
"""[P] a sample's prompt, images expanded."""


class Answers(Protocol):
    """Log-probabilities of completions."""

    def __call__(self, segments: Sequence[Segment], context: ObjectiveContext, *, top_k: int) -> list[Teaching]:
        """One for each segment, in order; all ranks call it equally often, also without segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAnswers:
    """A model in the learner's process."""

    model: nn.Module | None
    """None: the policy."""
    average: WeightAverage | None = None
    """Weights that the policy teaches with; None: those that it has."""

    def __call__(self, segments: Sequence[Segment], context: ObjectiveContext, *, top_k: int) -> list[Teaching]:
        """By a forward pass."""
        with nullcontext() if self.average is None else self.average.in_place():
            return context.teach(segments, model=self.model, top_k=top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswers:
    """A server, one call for each completion."""

    server: TeacherServer
    timeout_s: float
    """Of one call, and from its first failure on of its repetitions."""

    def __call__(self, segments: Sequence[Segment], context: ObjectiveContext, *, top_k: int) -> list[Teaching]:
        """Calls at the same time, each repeated while the server is busy or away.

        Errors: those of ``TeacherServer.teach``.
        """
        if not segments:
            return []

        def ask(segment: Segment) -> Teaching:
            return call_with_retries(
                partial(
                    self.server.teach, segment.token_ids, segment.prompt_len, top_k=top_k, timeout_s=self.timeout_s
                ),
                budget_s=self.timeout_s,
                failed=warn,
                clock=time,
            )

        def warn(error: RolloutError, pause: Pause | None) -> None:
            if pause is not None:
                LOG.warning("teacher %s, attempt %d in %.2g s: %s", self.server.base_url, *pause[:2], error)

        with ThreadPoolExecutor(min(MAX_CALLS, len(segments))) as pool:
            return list(pool.map(ask, segments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """One entry of ``distill.teachers``."""

    answers: Answers
    weight: float = 1.0
    when: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the samples that it teaches."""
    prompt_of: PromptOf | None = None
    """What it is asked; None: what the policy was asked."""

    def teaches(self, sample: Sample) -> bool:
        """Whether the sample's metadata has all of ``when``."""
        return all(name in sample.metadata and sample.metadata[name] == value for name, value in self.when.items())

    def teach(self, segments: Sequence[Segment], context: ObjectiveContext, *, top_k: int) -> list[Segment]:
        """The segments with what this teacher says of them. All ranks call it, also without segments."""
        answers = self.answers([self._asked(segment) for segment in segments], context, top_k=top_k)
        return [
            replace(
                segment,
                policy=replace(
                    segment.policy,  # type: ignore[type-var]
                    teacher_logprobs=one.logprobs,
                    teacher_top=one.top if top_k else None,
                    teacher_weight=self.weight,
                ),
            )
            for segment, one in zip(segments, answers, strict=True)
        ]

    def _asked(self, segment: Segment) -> Segment:
        """The same completion behind the teacher's prompt."""
        if self.prompt_of is None:
            return segment
        prompt, target = self.prompt_of(segment.sample), segment.token_ids[segment.prompt_len :]
        return replace(segment, token_ids=(*prompt, *target), prompt_len=len(prompt))


def teacher_of(teachers: Sequence[Teacher], sample: Sample) -> int | None:
    """Place of the first teacher that teaches a sample; None: no teacher does."""
    return next((place for place, teacher in enumerate(teachers) if teacher.teaches(sample)), None)


def teach_all(
    teachers: Sequence[Teacher], segments: Sequence[Segment], context: ObjectiveContext, *, top_k: int
) -> list[Segment]:
    """Each segment as its sample's teacher teaches it, in order."""
    taught = list(segments)
    owners = [teacher_of(teachers, segment.sample) for segment in segments]
    for place, teacher in enumerate(teachers):
        mine = [index for index, owner in enumerate(owners) if owner == place]
        for index, segment in zip(mine, teacher.teach([segments[index] for index in mine], context, top_k=top_k)):
            taught[index] = segment
    return taught
