"""Steps of a run's journal, as overlap is measured by it."""

import statistics
from itertools import chain, pairwise
from typing import Any

Journal = list[dict[str, Any]]


def steps_of(journal: Journal, *, num_warm_up: int, tail: int) -> list[float]:
    """Seconds of those that are measured, by the time from one's end to the next one's."""
    ends = [event["ended"] for event in journal if event["event"] == "timeline"][num_warm_up - 1 : -tail]
    return [end - before for before, end in pairwise(ends)]


def busy(journal: Journal, name: str, *, num_warm_up: int, tail: int) -> float:
    """Median seconds of rollout or learning in a step, such as ``rollout_s``."""
    figures = [event["overlap"][name] for event in journal if event["event"] == "step"]
    return statistics.median(figures[num_warm_up:-tail])


def samples_of(journal: Journal) -> list[list[str]]:
    """What each step learns from."""
    return [sorted(chain(*event["sample_ids"])) for event in journal if event["event"] == "packed"]
