"""When the learner and the servers were busy, and how close a step came to the longer of the two."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Span = tuple[float, float]
"""Begin and end in unix seconds."""
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

    >>> times = measure((10.0, 20.0), {"learn": 6.0, "sync": 1.0}, [[(8.0, 14.0), (12.0, 15.0)], [(19.0, 30.0)]])
    >>> times.rollout_s, times.learn_s, times.servers_idle, times.learner_idle, times.efficiency
    (5.0, 6.0, 0.7, 0.4, 0.6)
    """
    length = step[1] - step[0]
    busy = [covered(spans, within=step) for spans in calls]
    learn_s = sum(phase_s.get(phase, 0.0) for phase in BUSY)
    return StepTimes(
        step_s=length,
        rollout_s=max(busy, default=0.0),
        learn_s=learn_s,
        sync_s=phase_s.get("sync", 0.0),
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


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole else 0.0
