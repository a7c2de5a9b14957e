"""Distillation as an objective: the policy writes, teachers say how likely each of its tokens should have been."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import ClassVar

from rollmatch.environments.trajectory import EpisodeRollout
from rollmatch.learn.batch import MicroBatch
from rollmatch.learn.head import Logits
from rollmatch.objectives.distill.loss import DISTILL_TERM_NAMES, Divergence, distill_loss
from rollmatch.objectives.distill.teacher import Teacher, begin_all, teach_all
from rollmatch.objectives.grpo.loss import PolicyTerms, PolicyTotals
from rollmatch.objectives.grpo.objective import GrpoObjective
from rollmatch.objectives.grpo.reward import Judgement
from rollmatch.objectives.grpo.segments import CompletionReport, policy_segment
from rollmatch.objectives.protocol import Evaluated, ObjectiveContext
from rollmatch.records import PolicyTarget, Rollout, RolloutRequest, Sample, Segment


@dataclass(frozen=True, kw_only=True)
class DistillObjective(GrpoObjective):
    """``trainer_variant: distill``; rewards are added where there are some."""

    teachers: tuple[Teacher, ...]
    divergence: Divergence | None
    """None: the sampled tokens alone."""
    environment_weight: float = 0.0
    """Of what the environment pays; 0: it is shown, not learnt from."""
    term_names: ClassVar[tuple[str, ...]] = DISTILL_TERM_NAMES

    def with_logprobs(
        self, segments: Sequence[Segment], rollouts: Sequence[Rollout], context: ObjectiveContext
    ) -> list[Segment]:
        """As GRPO's, and those by the teachers."""
        return self._taught(super().with_logprobs(segments, rollouts, context), context)

    def loss(self, logits: Logits, batch: MicroBatch, *, totals: PolicyTotals) -> PolicyTerms:
        """GRPO's, and the teachers' part. Errors: as ``policy_loss``."""
        return distill_loss(
            logits,
            supervision=batch.supervision,
            rules=self.policy_rules,
            divergence=self.divergence,
            totals=totals,
            is_kept=batch.is_packed,
        )

    def summarize(self, reports: Sequence[CompletionReport]) -> dict[str, float]:
        """As GRPO's, without what says nothing here: groups learn from teachers, whatever their rewards are."""
        is_paid = bool(self.rewards) or self.world is not None
        unknown = {"flat_group_rate"} | (set() if is_paid else {"reward_failed_rate"})
        if not any(reward.weight for reward in self.rewards) and (self.rewards or self.world is None):
            unknown |= {"reward", "reward_std"}
        return {name: value for name, value in super().summarize(reports).items() if name not in unknown}

    def evaluate(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext) -> Evaluated:
        """As GRPO's, and ``teacher_logprob``: the mean over all tokens of the answers."""
        found = super().evaluate(samples, rollouts, context)
        ranks = context.ranks
        mine = [
            _judged(sample, rollout)
            for sample, rollout in list(zip(samples, rollouts, strict=True))[ranks.rank :: ranks.learner_world_size]
        ]
        taught = [_of_the_policy(one.policy) for one in self._taught(mine, context) if one.policy]
        shares = ranks.gather([(sum(logprobs), float(len(logprobs))) for logprobs in taught])
        whole = [shares[place % len(shares)][place // len(shares)] for place in range(len(samples))]
        total, num = (sum(column) for column in zip(*whole, strict=True))
        return Evaluated(
            metrics={**found.metrics, "teacher_logprob": total / (num or 1)},
            record=found.record,
            parts={**found.parts, "teacher_logprob": whole},
        )

    def arrived(self, step: int, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> None:
        """Rollouts of the window of ``step`` are there while the learner learns: servers that teach are asked."""
        pairs = zip(requests, rollouts, strict=True)
        segments = [_judged(request.sample, rollout) for request, rollout in pairs]
        begin_all(self.teachers, step, segments, top_k=self._top_k)

    def _advantages(self, judged: Sequence[Judgement], context: ObjectiveContext) -> list[float]:
        """As GRPO's; of an environment's pay by its weight."""
        if self.rewards:
            return super()._advantages(judged, context)
        if not self.environment_weight:
            return [0.0] * len(judged)
        totals = [None if one.total is None else self.environment_weight * one.total for one in judged]
        paid = [replace(one, total=total) for one, total in zip(judged, totals, strict=True)]
        return super()._advantages(paid, context)

    @property
    def _top_k(self) -> int:
        return 1 if self.divergence is None else self.divergence.top_k

    def _taught(self, segments: Sequence[Segment], context: ObjectiveContext) -> list[Segment]:
        return teach_all(self.teachers, segments, context, top_k=self._top_k)


def _judged(sample: Sample, rollout: Rollout) -> Segment:
    """A rollout that nothing but teachers judges."""
    episode = rollout.trajectory if isinstance(rollout, EpisodeRollout) else None
    target = PolicyTarget(
        advantages=(0.0,) * len(rollout.sampled_ids),
        is_written=None if episode is None else episode.written,
        is_masked=episode is not None and bool(episode.failure),
    )
    return policy_segment(sample, rollout, target)


def _of_the_policy(target: PolicyTarget) -> tuple[float, ...]:
    """The teacher's log-probabilities of what the policy wrote; none of an episode that failed.

    >>> mask = (True, False, True)
    >>> _of_the_policy(PolicyTarget(advantages=(0.0,) * 3, teacher_logprobs=(-1.0, -2.0, -3.0), is_written=mask))
    (-1.0, -3.0)
    """
    logprobs = () if target.is_masked else target.teacher_logprobs or ()
    return logprobs if target.is_written is None else tuple(compress(logprobs, target.is_written))
