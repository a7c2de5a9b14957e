"""What one optimizer step did, phase by phase, as figures for the log and the journal."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rollmatch.learn.batch import MicroBatch
from rollmatch.objectives.protocol import Objective
from rollmatch.records import Rollout

PHASES = ("sync", "rollout", "target", "pack", "learn")


@dataclass(slots=True)
class StepReport:
    """Filled while a step runs. Made by ``trainer``; ``figures`` goes into the log and the journal."""

    step: int
    objective: Objective
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    rollouts: Sequence[Rollout] = ()
    """Of the window, at its first step; empty at the steps that learn from them again."""
    num_rollout_tokens: int | None = None
    """Of all turns, where ``rollouts`` are only the first ones."""
    reports: Sequence[Any] = ()
    batches: Sequence[MicroBatch] = ()
    num_carried: int = 0
    terms: dict[str, float] = field(default_factory=dict)
    learn_began: float = 0.0
    """Unix seconds, as all of them here."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Optimizer steps between the weights that wrote a rollout and these -> number of rollouts; empty: none."""
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
        """All that was no other phase since learning began was learning."""
        reached, now = self.learn_began, time.time()
        for _, begin, end in [span for span in self.spans if span[1] >= self.learn_began] + [("", now, now)]:
            if begin > reached:
                self.phase_s["learn"] += begin - reached
                self.spans.append(("learn", reached, begin))
            reached = end

    def add_terms(self, figures: Mapping[str, float]) -> None:
        """Add one micro-batch's share of the loss and of what is measured beside it."""
        for name, value in figures.items():
            self.terms[name] = self.terms.get(name, 0.0) + value

    def figures(self) -> dict[str, float]:
        """Flat numbers of this rank's step; rates and means as the objective's ``summarize`` defines them."""
        waited_for = sum(len(rollout.response_token_ids) for rollout in self.rollouts)
        rollout_tokens = waited_for if self.num_rollout_tokens is None else self.num_rollout_tokens
        learn_tokens = sum(batch.num_tokens for batch in self.batches)
        fills = [batch.fill for batch in self.batches]
        return {
            **(dict.fromkeys(self.objective.term_names, 0.0) | self.terms),
            **self.objective.summarize(self.reports),
            "fill": sum(fills) / len(fills) if fills else 0.0,
            "segments": float(sum(len(batch.segments) for batch in self.batches)),
            "carried": float(self.num_carried),
            "rollout_tokens": float(rollout_tokens),
            "rollout_tok_s": waited_for / self.phase_s["rollout"] if self.phase_s["rollout"] else 0.0,
            "learn_tokens": float(learn_tokens),
        }
