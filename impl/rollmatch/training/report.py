"""What one optimizer step did, phase by phase, as figures for the log and the journal."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rollmatch.learn.batch import MicroBatch
from rollmatch.objectives.answers import expected_of, question_of
from rollmatch.objectives.protocol import Objective
from rollmatch.records import Rollout, Sample, rounded
from rollmatch.rollout.prefetch import Prefetch
from rollmatch.rollout.window import FinishedCall

PHASES = ("sync", "rollout", "target", "pack", "learn")
Span = tuple[float, float]
"""Begin and end in unix seconds."""
TextOf = Callable[[Sequence[int]], str]
"""The text of tokens."""
LONGEST_TEXT = 4000
"""Characters of a completion in the journal."""
WORTH = ("reward", "f1")
"""Figures of an objective that say how good one completion is."""
BUSY = ("target", "pack", "learn")
"""Phases in which the learner works; the others are sync and waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one optimizer step, from its first word to its last."""

    step_s: float
    rollout_s: float
    """R: in which the busiest server was writing."""
    learn_s: float
    """L: in which the learner worked."""
    sync_s: float
    servers_idle: float
    """Share of the step in which a server did nothing, mean over servers."""
    learner_idle: float
    """Share of the step in which the learner did nothing, sync included."""

    @property
    def efficiency(self) -> float:
        """max(R, L) / step: 1 where the longer side never waited."""
        return max(self.rollout_s, self.learn_s) / self.step_s if self.step_s else 0.0

    def figures(self) -> dict[str, float]:
        """For the log."""
        return {
            "overlap/rollout_s": self.rollout_s,
            "overlap/learn_s": self.learn_s,
            "overlap/sync_s": self.sync_s,
            "overlap/servers_idle": self.servers_idle,
            "overlap/learner_idle": self.learner_idle,
            "overlap/efficiency": self.efficiency,
        }


def measure(step: Span, phase_s: Mapping[str, float], calls: Sequence[Iterable[Span]]) -> StepTimes:
    """``calls`` are the spans of each server's calls; what lies outside the step does not count.

    >>> phase_s = {"sync": 1.0, "target": 0.5, "pack": 0.5, "learn": 5.0}
    >>> times = measure((10.0, 20.0), phase_s, [[(8.0, 14.0), (12.0, 15.0)], [(19.0, 30.0)]])
    >>> times.rollout_s, times.learn_s, times.servers_idle, times.learner_idle, times.efficiency
    (5.0, 6.0, 0.7, 0.4, 0.6)
    """
    length = step[1] - step[0]
    busy = [covered(spans, within=step) for spans in calls]
    learn_s = sum(phase_s[phase] for phase in BUSY)
    return StepTimes(
        step_s=length,
        rollout_s=max(busy, default=0.0),
        learn_s=learn_s,
        sync_s=phase_s["sync"],
        servers_idle=_share(length - sum(busy) / len(busy), length) if busy else 1.0,
        learner_idle=_share(length - learn_s, length),
    )


def covered(spans: Iterable[Span], *, within: Span) -> float:
    """Seconds of a span in which at least one of ``spans`` was under way.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 9.0)], within=(1.0, 6.0))
    3.0
    """
    total, reached = 0.0, within[0]
    for begin, end in sorted(spans):
        begin, end = max(begin, reached), min(end, within[1])
        if end > begin:
            total += end - begin
            reached = end
    return total


def speed_of(calls: Sequence[FinishedCall]) -> float:
    """Tokens a second of all servers, while at least one of these calls was under way: the learner waits for less.

    >>> from rollmatch.rollout.work_items import WorkItem
    >>> item = WorkItem(step=0, server_index=0, start=0, stop=1)
    >>> three = [(0.0, 2.0), (1.0, 3.0), (9.0, 10.0)]
    >>> speed_of([FinishedCall(item=item, began=a, ended=b, policy_version=1, num_tokens=8) for a, b in three])
    6.0
    """
    spans = [(call.began, call.ended) for call in calls]
    busy_s = covered(spans, within=(-math.inf, math.inf))
    return sum(call.num_tokens for call in calls) / busy_s if busy_s else 0.0


def gpu_use() -> dict[str, float]:
    """Share of the last second in which this rank's GPU computed; empty without a GPU, or without ``nvidia-ml-py``."""
    try:
        return {"gpu_use": torch.cuda.utilization() / 100} if torch.cuda.is_available() else {}
    except (ModuleNotFoundError, RuntimeError):
        return {}


def _share(part: float, whole: float) -> float:
    return max(0.0, part / whole) if whole else 0.0


def generated_fields(
    rollouts: Sequence[Rollout], *, step: int, seconds: float, policy_version: int
) -> dict[str, object]:
    """Fields of the journal's ``generated`` event; ``policy_version`` where there is no rollout.

    ``policy_versions``, runs of (version, number of tokens) of each rollout, where weights have changed within some.
    """
    runs = [rollout.policy_versions for rollout in rollouts]
    several = {"policy_versions": runs} if any(len(each) > 1 for each in runs) else {}
    return {
        "step": step,
        "seconds": rounded(seconds),
        "num_rollouts": len(rollouts),
        "num_tokens": sum(rollout.num_tokens for rollout in rollouts),
        "policy_version": min((rollout.policy_version for rollout in rollouts), default=policy_version),
        **several,
    }


@dataclass(slots=True)
class StepReport:
    """Filled while a step runs. Made by ``trainer``; ``figures`` goes into the log and the journal."""

    step: int
    objective: Objective
    num_batches: int = 1
    """Micro-batches of the step, on this rank."""
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    rollouts: Sequence[Rollout] = ()
    """Of the window, at its first step; empty at the steps that learn from them again."""
    is_given: bool = False
    """Whether ``rollouts`` are the data set's own answers, so that nothing was generated."""
    num_rollout_tokens: int | None = None
    """Of all turns, where ``rollouts`` are only the first ones."""
    summary: Mapping[str, float] = field(default_factory=dict)
    """What the window's rollouts were worth, by the objective's ``summarize``."""
    batches: Sequence[MicroBatch] = ()
    num_carried: int = 0
    terms: dict[str, float] = field(default_factory=dict)
    learn_began: float = 0.0
    """Unix seconds, as all of them here."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Optimizer steps between the weights that wrote a rollout and these -> number of rollouts; empty: none."""
    num_cut_prompts: int = 0
    """Rollouts whose prompt lacks its beginning, because it was too long."""
    num_cut: int = 0
    """Segments of which the same is true."""
    num_skipped: int = 0
    """Segments that are left out, because they were too long."""
    began: float = field(default_factory=time.time)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """Phase, begin and end, as they happened."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.note(name, time.perf_counter() - began)

    def note(self, name: str, seconds: float) -> None:
        """Add time that has just passed to a phase."""
        self.phase_s[name] += seconds
        if seconds:
            now = time.time()
            self.spans.append((name, now - seconds, now))

    def end_learning(self) -> None:
        """Count the time outside all other phases, since learning began, as learning."""
        reached, now = self.learn_began, time.time()
        for _, begin, end in [span for span in self.spans if span[1] >= self.learn_began] + [("", now, now)]:
            if begin > reached:
                self.phase_s["learn"] += begin - reached
                self.spans.append(("learn", reached, begin))
            reached = end

    def completions(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout], reports: Sequence[object], text_of: TextOf
    ) -> list[dict[str, object]]:
        """Rollouts for the journal: what was written, why it ended and what it was worth."""
        return [
            {
                "sample_id": sample.sample_id,
                "question": question_of(sample),
                "expected": expected_of(sample)[:LONGEST_TEXT],
                "text": text_of(rollout.response_token_ids)[:LONGEST_TEXT],
                "num_tokens": rollout.num_tokens,
                "finish_reason": rollout.finish_reason,
                "worth": {n: v for n, v in self.objective.summarize([report]).items() if n in WORTH},
                "columns": {n: str(v)[:LONGEST_TEXT] for n, v in getattr(report, "columns", {}).items()},
            }
            for sample, rollout, report in zip(samples, rollouts, reports)
        ]

    def add_terms(self, figures: Mapping[str, float]) -> None:
        """Add one micro-batch's share of the loss and of what is measured beside it."""
        for name, value in figures.items():
            self.terms[name] = self.terms.get(name, 0.0) + value

    def sum_terms(self, sum_over_ranks: Callable[[Sequence[float]], list[float]]) -> None:
        """Make this rank's shares of the terms those of the whole step. All ranks call it, once it has been learnt."""
        names = self.objective.term_names
        self.terms = dict(zip(names, sum_over_ranks([self.terms.get(name, 0.0) for name in names]), strict=True))

    @property
    def is_finite(self) -> bool:
        """Whether this rank's losses are numbers; by others, the step's weights are no numbers either."""
        return all(math.isfinite(value) for name, value in self.terms.items() if name.startswith("loss"))

    def figures(self, sum_over_ranks: Callable[[Sequence[float]], list[float]] = list) -> dict[str, float]:
        """Flat numbers of the step, of all ranks; rates and means as the objective's ``summarize`` defines them.
        Speeds are all ranks' tokens by this rank's seconds. All ranks call it."""
        generated, batches = () if self.is_given else self.rollouts, self.batches
        waited_for = sum(rollout.num_tokens for rollout in generated)
        counts: dict[str, float] = {
            "segments": sum(len(batch.segments) for batch in batches),
            "carried": self.num_carried,
            "rollout_tokens": waited_for if self.num_rollout_tokens is None else self.num_rollout_tokens,
            "learn_tokens": sum(batch.num_tokens for batch in batches),
            "shared_tokens": sum(batch.num_shared for batch in batches),
            "overlong/prompts_truncated": self.num_cut_prompts,
            "overlong/segments_truncated": self.num_cut,
            "overlong/segments_skipped": self.num_skipped,
        }
        parts = [*counts.values(), waited_for, len(batches), sum(batch.fill for batch in batches)]
        *sums, tokens, num_batches, fill = sum_over_ranks(parts)
        counts = dict(zip(counts, map(float, sums), strict=True))
        rollout_s, learn_s = self.phase_s["rollout"], self.phase_s["learn"]
        return {
            **(dict.fromkeys(self.objective.term_names, 0.0) | self.terms),
            **self.summary,
            **counts,
            "fill": fill / num_batches if num_batches else 0.0,
            "rollout_tok_s": tokens / rollout_s if rollout_s else 0.0,
            "learn_tok_s": counts["learn_tokens"] / learn_s if learn_s else 0.0,
            "forwards_s": num_batches / learn_s if learn_s else 0.0,
        }

    def generated(self, rollouts: Sequence[Rollout], *, policy_version: int) -> dict[str, object]:
        """Fields of the journal's ``generated`` event; ``seconds`` is how long the learner waited."""
        seconds = self.phase_s["rollout"]
        return generated_fields(rollouts, step=self.step, seconds=seconds, policy_version=policy_version)

    def packed(self) -> dict[str, object]:
        """Fields of the journal's ``packed`` event."""
        batches = self.batches
        return {
            "step": self.step,
            "rows": len(batches),
            "segments": sum(len(batch.segments) for batch in batches),
            "sample_ids": [[segment.sample.sample_id for segment in batch.segments] for batch in batches],
            "tokens": sum(batch.num_tokens for batch in batches),
            "fill": rounded(sum(batch.fill for batch in batches) / len(batches)),
            "oldest_policy_version": min(segment.policy_version for batch in batches for segment in batch.segments),
            "carried": self.num_carried,
        }

    def times(
        self, prefetch: Prefetch | None, sum_over_ranks: Callable[[Sequence[float]], list[float]] = list
    ) -> tuple[dict[str, float], dict[str, object]]:
        """When learner and servers were busy in a step that has ended: figures for the log, and its timeline.

        The speed of rollouts made ahead stands in place of that of ``figures``, which knows the learner's wait alone.
        It is that of all ranks, which all call this.
        """
        now, calls = time.time(), prefetch.take_calls() if prefetch else []
        waits = [(begin, end) for name, begin, end in self.spans if name == "rollout"]
        busy = prefetch.spans_of(calls, now=now) if prefetch else [waits]
        times = measure((self.began, now), self.phase_s, busy)
        timeline = {
            "step": self.step,
            "began": rounded(self.began),
            "ended": rounded(now),
            "learner": [[name, rounded(begin), rounded(end)] for name, begin, end in sorted(self.spans)],
            "calls": [c.as_list() for c in calls] if prefetch else [[0, *wait, self.step] for wait in waits],
        }
        ages = self.staleness or {0: len(self.rollouts)}
        figures = times.figures() | {f"staleness/{age}": float(number) for age, number in ages.items()}
        if prefetch:
            (figures["rollout_tok_s"],) = sum_over_ranks([speed_of(calls)])
        return figures, timeline
