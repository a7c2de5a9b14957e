"""Who says how likely each token of a completion should have been."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any, Protocol

from torch import nn

from rollmatch.data.image import sent_bytes
from rollmatch.dialects.vllm.client import MAX_CALLS
from rollmatch.dialects.vllm.teacher import JudgedTokens, TeacherServer
from rollmatch.errors import RolloutError
from rollmatch.learn.average import WeightAverage
from rollmatch.objectives.protocol import ObjectiveContext
from rollmatch.records import Sample, Segment, Teaching
from rollmatch.rollout.retry import Pause, call_with_retries, shared_failure

LOG = logging.getLogger("rollmatch.teacher")

PromptOf = Callable[[Sample], tuple[int, ...]]
"""[P] a sample's prompt, images expanded."""
Unexpanded = Callable[[Sample, Sequence[int]], tuple[int, ...]]
"""Token ids that begin with a sample's prompt, expanded -> the same with one placeholder per image."""


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


class ServerAnswers:
    """A server, one call for each completion. Its answers do not depend on the policy's weights, so that completions of
    later windows may be judged while the learner learns.
    """

    def __init__(self, *, server: TeacherServer, unexpanded: Unexpanded, timeout_s: float) -> None:
        """``timeout_s``: of one call, and from its first failure on of its repetitions."""
        self.server, self.unexpanded, self.timeout_s = server, unexpanded, timeout_s
        self._early: dict[int, dict[Asked, AsyncResult[Teaching]]] = {}
        """First optimizer step of a window -> what was asked of it before its targets were made."""
        self._failure: RolloutError | None = None
        """Of the first call that failed for good: the run ends by it, and no other is repeated."""

    def begin(self, step: int, segments: Sequence[Segment], *, top_k: int) -> None:
        """Call the server about segments of the window of ``step``; from any thread, waits for nothing."""
        asked = self._early.setdefault(step, {})
        for segment in segments:
            asked[_key(segment, top_k)] = self._ask(segment, top_k)

    def __call__(self, segments: Sequence[Segment], context: ObjectiveContext, *, top_k: int) -> list[Teaching]:
        """What was asked before, or calls at the same time, each repeated while the server is busy or away.

        Errors: those of ``TeacherServer.teach``; ``rank-failed`` on ranks whose own calls were answered.
        """
        for step in [step for step in list(self._early) if step < context.step]:
            del self._early[step]
        asked = self._early.get(context.step, {})
        calls = [asked.get(_key(segment, top_k)) or self._ask(segment, top_k) for segment in segments]
        error, found = None, list[Teaching]()
        try:
            found = [call.get() for call in calls]
        except RolloutError as failure:
            error = failure
        failed = context.ranks.gather(str(error or ""))
        if any(failed):
            rank, problem = next((rank, problem) for rank, problem in enumerate(failed) if problem)
            raise shared_failure(error, rank=rank, problem=problem, key=self.server.base_url)
        return found

    @cached_property
    def _pool(self) -> ThreadPool:
        return ThreadPool(MAX_CALLS)  # of daemons: a run that ends waits for no teacher

    def _ask(self, segment: Segment, top_k: int) -> "AsyncResult[Teaching]":
        judged = judged_tokens(segment.sample, segment.token_ids, segment.prompt_len, unexpanded=self.unexpanded)
        teach = partial(self.server.teach, judged, top_k=top_k, timeout_s=self.timeout_s)
        return self._pool.apply_async(
            call_with_retries, (teach,), {"budget_s": self.timeout_s, "failed": self._warn, "clock": time}
        )

    def _warn(self, error: RolloutError, pause: Pause | None) -> None:
        self._failure = self._failure or (error if pause is None else None)
        if self._failure is not None:
            raise self._failure
        if pause is not None:
            LOG.warning("teacher %s, attempt %d in %.2g s: %s", self.server.base_url, *pause[:2], error)


Asked = tuple[tuple[int, ...], int, tuple[str, ...], int]
"""Tokens, how many of them are the prompt, the prompt's images, and how many likeliest are asked for."""


def _key(segment: Segment, top_k: int) -> Asked:
    return segment.token_ids, segment.prompt_len, segment.sample.images, top_k


def judged_tokens(
    sample: Sample, token_ids: tuple[int, ...], prompt_len: int, *, unexpanded: Unexpanded
) -> JudgedTokens:
    """Tokens behind a sample's prompt, with its images as servers get them. Errors: those of ``sent_bytes``."""
    if not sample.images:
        return JudgedTokens(token_ids=token_ids, prompt_len=prompt_len)
    return JudgedTokens(
        token_ids=token_ids,
        prompt_len=prompt_len,
        images=tuple(map(sent_bytes, sample.images)),
        sent_ids=unexpanded(sample, token_ids),
    )


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

    def begin(self, step: int, segments: Sequence[Segment], *, top_k: int) -> None:
        """Let a server judge segments of a later window meanwhile. A model of the learner's process computes where the
        learner does, and the policy's weights are others then: they judge when targets are made.
        """
        if isinstance(self.answers, ServerAnswers):
            self.answers.begin(step, [self._asked(segment) for segment in segments], top_k=top_k)

    def _asked(self, segment: Segment) -> Segment:
        """The same completion behind the teacher's prompt."""
        if self.prompt_of is None:
            return segment
        prompt, target = self.prompt_of(segment.sample), segment.token_ids[segment.prompt_len :]
        return replace(segment, token_ids=(*prompt, *target), prompt_len=len(prompt))


def teacher_of(teachers: Sequence[Teacher], sample: Sample) -> int | None:
    """Place of the first teacher that teaches a sample; None: no teacher does."""
    return next((place for place, teacher in enumerate(teachers) if teacher.teaches(sample)), None)


def begin_all(teachers: Sequence[Teacher], step: int, segments: Sequence[Segment], *, top_k: int) -> None:
    """Each segment of the window of ``step`` to its sample's teacher, if that is a server."""
    for place, teacher in enumerate(teachers):
        mine = [segment for segment in segments if teacher_of(teachers, segment.sample) == place]
        teacher.begin(step, mine, top_k=top_k)


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
