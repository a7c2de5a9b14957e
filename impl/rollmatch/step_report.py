"""What one optimizer step did, phase by phase, as figures for the log and the journal."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollmatch.learn.batch import MicroBatch
from rollmatch.learn.loss import LossTerms
from rollmatch.records import Rollout
from rollmatch.target.rollout_matching import RolloutReport, summarize

PHASES = ("sync", "rollout", "target", "pack", "learn")


@dataclass(slots=True)
class StepReport:
    """Filled while a step runs. Made by ``trainer``; ``figures`` goes into the log and the journal."""

    step: int
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    rollouts: Sequence[Rollout] = ()
    reports: Sequence[RolloutReport] = ()
    batches: Sequence[MicroBatch] = ()
    num_carried: int = 0
    loss_ce: float = 0.0
    loss_coord: float = 0.0
    learn_began: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.phase_s[name] += time.perf_counter() - began

    def add_terms(self, terms: LossTerms) -> None:
        """Add one micro-batch's share of the loss."""
        self.loss_ce += float(terms.ce)
        self.loss_coord += float(terms.coord)

    def figures(self) -> dict[str, float]:
        """Flat numbers of this rank's step; rates and means as ``summarize`` defines them."""
        rollout_tokens = sum(len(rollout.response_token_ids) for rollout in self.rollouts)
        learn_tokens = sum(batch.num_tokens for batch in self.batches)
        fills = [batch.fill for batch in self.batches]
        return {
            "loss_ce": self.loss_ce,
            "loss_coord": self.loss_coord,
            **summarize(self.reports),
            "appended": float(sum(report.appended for report in self.reports)),
            "fill": sum(fills) / len(fills) if fills else 0.0,
            "segments": float(sum(len(batch.segments) for batch in self.batches)),
            "carried": float(self.num_carried),
            "rollout_tokens": float(rollout_tokens),
            "rollout_tok_s": rollout_tokens / self.phase_s["rollout"] if self.phase_s["rollout"] else 0.0,
            "learn_tokens": float(learn_tokens),
        }
