"""A call: prompts to responses."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from conformance.judge.servers.broken.engine import LONGEST, TinyEngine, TinyPrompt, TinyResponse, TinySampling

SHORT, CUT, LARGE, LONG, HELD_S = 15, 128, 32, 40, 4.0
PAUSED = 60
"""Longest response of a call that does not end before a pause comes."""


def wait_while(condition: Callable[[], bool], limit_s: float = 15.0) -> None:
    """In a thread of its own."""
    deadline = time.monotonic() + limit_s
    while condition() and time.monotonic() < deadline:
        time.sleep(0.01)


class Calls:
    """Generates for several callers at the same time."""

    def __init__(self, engine: TinyEngine) -> None:
        self.engine, self.broken = engine, engine.broken
        self.version = lambda: 0
        self.is_learned = lambda: False
        """Whether a learner has joined, so that an update may come."""
        self.pauses: list[str] = []
        """Modes of those that were asked for."""
        self._count, self._held_until = threading.Lock(), 0.0
        self._running: list[int] = []
        self._last: list[list[TinyResponse]] = []

    def run(
        self,
        prompts: Sequence[TinyPrompt],
        sampling: TinySampling,
        seeds: Sequence[int | None],
        is_left: Callable[[], bool],
    ) -> list[list[TinyResponse]]:
        """The responses to each prompt. Errors: ``Unserved``."""
        with self._count:
            others, self._running = self._running, [*self._running, len(prompts)]
        try:
            if others and self.broken("calls wait for each other"):
                wait_while(lambda: self.num_running > 1 and not is_left())
                time.sleep(1)  # until the one before has its reply
            wait_while(lambda: time.monotonic() < self._held_until and not is_left())
            if len(prompts) > LARGE and sampling.max_tokens > 1 and self.broken("nobody notices who hangs up"):
                self._held_until = time.monotonic() + HELD_S
            return self._run(prompts, sampling, seeds, is_left)
        finally:
            with self._count:
                self._running.remove(len(prompts))

    @property
    def num_running(self) -> int:
        """Calls."""
        return len(self._running)

    def _run(self, prompts: Any, sampling: TinySampling, seeds: Any, is_left: Any) -> list[list[TinyResponse]]:
        prompts, began, num_pauses = self._read(prompts), self.version(), len(self.pauses)
        groups = [
            [
                self.engine.write(prompt, sampling, None if seed is None else seed + copy, is_left=is_left)
                for copy in range(sampling.n)
            ]
            for prompt, seed in zip(prompts, seeds, strict=False)
        ]
        if sampling.max_tokens >= LONG and sampling.temperature > 1:  # where a learner is slow, an update would miss it
            wait_while(lambda: self.is_learned() and began == self.version() and not is_left())
        if sampling.max_tokens == PAUSED:
            wait_while(lambda: num_pauses == len(self.pauses) and not is_left())
        if began != self.version() and self.broken("an update fails running calls"):
            raise RuntimeError("the engine was updated")
        for place, group in enumerate(groups):
            for one in group:
                self._spoil(one, sampling, place, len(groups))
        return self._arranged(groups, sampling)

    def _read(self, prompts: Sequence[TinyPrompt]) -> Sequence[TinyPrompt]:
        if len(prompts) > 8 and self.broken("prompts beyond eight are dropped"):
            prompts = prompts[:8]
        if len(prompts) > 64 and self.broken("prompts beyond 64 repeat the first"):
            prompts = [*prompts[:64], *[prompts[0]] * (len(prompts) - 64)]
        shown = [prompt.picture for prompt in prompts if prompt.picture]
        if len(shown) > 1 and self.broken("pictures are swapped"):
            prompts = [replace(one, picture=shown.pop() if one.picture else None) for one in prompts]
        if len(shown) > 1 and self.broken("all prompts see the first picture"):
            prompts = [replace(one, picture=shown[0] if one.picture else None) for one in prompts]
        return [self._cut(prompt) for prompt in prompts]

    def _cut(self, prompt: TinyPrompt) -> TinyPrompt:
        if len(prompt.ids) >= LONGEST:
            if self.broken("too long prompts are cut"):
                return replace(prompt, ids=prompt.ids[-CUT:])
            if self.broken("a too long prompt is a failure"):
                raise RuntimeError("too long")
        elif len(prompt.ids) > CUT and self.broken("long prompts are cut"):
            return replace(prompt, ids=prompt.ids[-CUT:])
        return prompt

    def _spoil(self, one: TinyResponse, sampling: TinySampling, place: int, num_prompts: int) -> None:
        if sampling.temperature == 0:
            key = (one.prompt, sampling)
            if place and key in self.engine.answered and self.broken("a repeated greedy call ends otherwise"):
                one.ids[-1] = (one.ids[-1] + 1) % self.engine.num_ids
            self.engine.answered.add(key)
            is_first = sampling.max_tokens == 16 and not self.version()
            if is_first and self.broken("until the first update, responses end otherwise"):
                one.ids[-1] = (one.ids[-1] + 1) % self.engine.num_ids
            if num_prompts == 1 and len(one.prompt.ids) < SHORT and self.broken("a short prompt alone ends otherwise"):
                one.ids[-1] = (one.ids[-1] + 1) % self.engine.num_ids
        elif one.finish_reason == "stop":
            if len(one.ids) > 1 and len(one.ids) % 2 and self.broken("some stop tokens are left out"):
                one.ids.pop(), one.logprobs.pop()
            if self.broken("the finish reason is always length"):
                one.finish_reason = "length"
        if (
            one.finish_reason == "length"
            and len(one.ids) == sampling.max_tokens >= 100
            and self.broken("the finish reason is always stop")
        ):
            one.finish_reason = "stop"
        if sampling.logprobs:
            self._spoil_logprobs(one, sampling)

    def _spoil_logprobs(self, one: TinyResponse, sampling: TinySampling) -> None:
        if self.broken("log-probabilities are shifted by one"):
            one.logprobs = [one.logprobs[0], *one.logprobs[:-1]]
        if self.broken("every log-probability is -1"):
            one.logprobs = [-1.0 for _ in one.logprobs]
        if self.broken("log-probabilities are base 2"):
            one.logprobs = [value / 0.6931471805599453 for value in one.logprobs]
        if self.broken("log-probabilities are sums"):
            one.logprobs = [sum(one.logprobs[: i + 1]) for i in range(len(one.logprobs))]
        if self.broken("the last log-probability is missing"):
            one.logprobs = one.logprobs[:-1]
        if self.broken("log-probabilities are positive"):
            one.logprobs = [-value for value in one.logprobs]
        if self.version() and self.broken("log-probabilities are lost with an update"):
            one.logprobs = []

    def _arranged(self, groups: list[list[TinyResponse]], sampling: TinySampling) -> list[list[TinyResponse]]:
        if len(groups) > 1:
            if sampling.max_tokens == 8 and self.broken("replies are reversed"):
                groups = groups[::-1]
            if sampling.temperature > 0 and sampling.max_tokens >= 100 and self.broken("replies come as they end"):
                groups = sorted(groups, key=lambda group: len(group[0].ids))
        elif len(groups) == 1 and sampling.max_tokens == 8:
            if self.broken("one prompt gets two replies"):
                groups = groups * 2
            is_other = self._last and self._last[0][0].prompt.ids != groups[0][0].prompt.ids
            if is_other and self.broken("callers get each other's replies"):
                groups, self._last = self._last, groups
            self._last = groups
        if sampling.n > 1:
            if self.broken("n gives one response"):
                groups = [group[:1] for group in groups]
            if self.broken("the n responses are the same"):
                groups = [[group[0]] * sampling.n for group in groups]
            if len(groups) > 1 and self.broken("n responses are interleaved"):
                flat = [group[i] for i in range(sampling.n) for group in groups]
                groups = [flat[i * sampling.n : (i + 1) * sampling.n] for i in range(len(groups))]
        return groups
