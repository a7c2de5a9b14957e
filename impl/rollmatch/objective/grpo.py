"""GRPO as an objective: each completion is measured by its group, and made likelier or less likely."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollmatch.evaluation import describe_answers
from rollmatch.learn.policy_loss import PolicyRules
from rollmatch.objective.policy_gradient import LogprobRules, PolicyGradient
from rollmatch.objective.seam import Evaluated, Harvest, Means, Reuse
from rollmatch.records import PolicyTarget, Rollout, Sample, Segment
from rollmatch.target.advantage import Baseline, Scale, group_advantages
from rollmatch.target.grpo import (
    CompletionReport,
    make_reports,
    policy_segment,
    summarize_completions,
    target_ids,
)
from rollmatch.target.reward import Judgement, Reward, Timing, judge_all
from rollmatch.vocabulary import Vocabulary

NUM_SHOWN = 64
"""Answers of an evaluation that are written down."""
NUM_FAILURES = 5
"""Failures of reward functions that are written down per window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """What a completion is compared with."""

    baseline: Baseline = "mean"
    scale: Scale = "group"
    mask_truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class GrpoObjective(PolicyGradient):
    """``trainer_variant: grpo``."""

    reuse: Reuse
    group_rules: GroupRules
    policy_rules: PolicyRules
    logprob_rules: LogprobRules
    rewards: tuple[Reward, ...]
    vocabulary: Vocabulary

    def make_segments(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], means: Means) -> Harvest:
        """``num_rollouts`` segments per sample. Errors: ``RewardsAllFailed``, ``LogprobsMisfit``."""
        asked = self.reuse.repeat(samples)
        judged, timing = self._judge(asked, rollouts)
        advantages = self._advantages(judged, means)
        segments = [self._segment(*four) for four in zip(asked, rollouts, judged, advantages, strict=True)]
        segments = self.with_logprobs(segments, rollouts, means)
        means.note(
            "rewarded",
            step=means.step,
            seconds={name: round(seconds, 4) for name, seconds in timing.seconds.items()},
            rewards=[judgement.total for judgement in judged],
            failures=[failure for judgement in judged for failure in judgement.failures][:NUM_FAILURES],
        )
        reports = make_reports(rollouts, judged, group_size=self.reuse.num_rollouts)
        return Harvest(segments=self.reuse.group(segments), reports=tuple(reports))

    def summarize(self, reports: Sequence[CompletionReport]) -> dict[str, float]:
        """Rewards, lengths and rates."""
        return summarize_completions(reports, [reward.name for reward in self.rewards])

    def evaluate(self, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> Evaluated:
        """Rewards of one completion each; some answers are written down."""
        judged, _ = self._judge(samples, rollouts)
        metrics = self.summarize(make_reports(rollouts, judged, group_size=1))
        metrics.pop("flat_group_rate", None)
        totals = [judgement.total for judgement in judged[:NUM_SHOWN]]
        record = describe_answers(samples, rollouts, totals, vocabulary=self.vocabulary)
        return Evaluated(metrics=metrics | {"num_scenes": float(len(samples))}, record=record)

    def _judge(self, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> tuple[list[Judgement], Timing]:
        timing = Timing()
        answers = [self.vocabulary.text(rollout.response_token_ids) for rollout in rollouts]
        return judge_all(answers, samples, self.rewards, timing), timing

    def _advantages(self, judged: Sequence[Judgement], means: Means) -> list[float]:
        """Of each completion. The standard deviation of all rewards is over all ranks."""
        mine = self.reuse.group([judgement.total for judgement in judged])
        ranks = means.ranks.gather(mine) if self.group_rules.scale == "batch" else [mine]
        place = means.ranks.rank if self.group_rules.scale == "batch" else 0
        first = sum(len(groups) for groups in ranks[:place])
        everyone = [group for groups in ranks for group in groups]
        advantages = group_advantages(everyone, baseline=self.group_rules.baseline, scale=self.group_rules.scale)
        return [advantage for group in advantages[first : first + len(mine)] for advantage in group]

    def _segment(self, sample: Sample, rollout: Rollout, judgement: Judgement, advantage: float) -> Segment:
        stop_id = self.vocabulary.stop_id
        is_truncated = rollout.finish_reason == "length"
        policy = PolicyTarget(
            advantages=(advantage,) * len(target_ids(rollout, stop_id=stop_id)),
            is_masked=judgement.total is None or (self.group_rules.mask_truncated and is_truncated),
        )
        return policy_segment(sample, rollout, policy, stop_id=stop_id)
