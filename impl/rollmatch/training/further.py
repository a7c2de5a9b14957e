"""Rollouts of further samples, in place of groups that teach nothing."""

import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from rollmatch.data import WindowPlan
from rollmatch.model.images import ImageFeatures
from rollmatch.records import Rollout, Sample
from rollmatch.rollout.source import RolloutSource
from rollmatch.training.report import generated_fields


@dataclass(slots=True, kw_only=True)
class FurtherSamples:
    """``RollOutFurther`` of one window: samples follow from seed, step and what all ranks asked for before.

    So ranks take different ones, and a run that is resumed takes the same.
    """

    source: RolloutSource
    samples: Sequence[Sample]
    plan: WindowPlan
    num_rollouts: int
    """For each sample."""
    step: int
    features: MutableMapping[int, ImageFeatures]
    """By sample id; those of further samples are added."""
    num_rounds: int = 0
    left: list[int] | None = None
    """Indices in the order in which they are taken; None: nothing was asked for."""

    def __call__(self, num: int) -> list[tuple[Sample, Rollout]]:
        """As the protocol. Errors: as ``RolloutSource.roll_out``, ``prompt-mismatch``."""
        source, ranks, began = self.source, self.source.ranks, time.perf_counter()
        if self.left is None:
            mine = self.plan.at(self.step).sample_indices
            self.left = self.plan.further(self.step, {index for taken in ranks.gather(mine) for index in taken})
        wanted = ranks.gather(num)
        start = sum(wanted[: ranks.rank])
        chosen = [self.samples[index] for index in self.left[start : start + num]]
        self.left = self.left[sum(wanted) :]
        asked = [sample for sample in chosen for _ in range(self.num_rollouts)]
        source.template.preparation.begin(asked)
        rollouts = source.roll_out(asked, self.step, purpose="further", round_index=self.num_rounds)
        self.features.update(source.check_alignment(asked, rollouts))
        self.num_rounds += 1
        seconds = time.perf_counter() - began
        event = generated_fields(rollouts, step=self.step, seconds=seconds, policy_version=source.policy_version)
        source.journal.write("generated", purpose="further", **event)
        return list(zip(asked, rollouts, strict=True))
