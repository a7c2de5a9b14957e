"""GRPO as an objective: each completion is measured by its group, and made likelier or less likely."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rollmatch.data import Reuse
from rollmatch.environments.trajectory import Trajectory
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.answers import NUM_SHOWN, describe_answers
from rollmatch.objectives.episodes import note_episodes, note_pace, note_part, offered_environments
from rollmatch.objectives.grpo.advantage import Baseline, Scale, group_advantages, is_flat
from rollmatch.objectives.grpo.loss import PolicyRules
from rollmatch.objectives.grpo.reward import Judgement, Reward, judge_all
from rollmatch.objectives.grpo.segments import (
    CompletionReport,
    make_reports,
    parts_of,
    policy_segment,
    summarize_completions,
)
from rollmatch.objectives.policy_gradient import LogprobRules, PolicyGradient
from rollmatch.objectives.protocol import Evaluated, ObjectiveContext, TrainingTargets
from rollmatch.records import PolicyTarget, Rollout, Sample, Segment, rounded
from rollmatch.rollout.episodes import EpisodeRunner

NUM_FAILURES = 5
"""Failures of reward functions that are written down per window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """What a completion is compared with."""

    baseline: Baseline = "mean"
    scale: Scale = "group"
    mask_truncated: bool
    max_rounds: int = 0
    """Rounds in which groups without spread are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A response, and what it was paid."""

    sample: Sample
    rollout: Rollout
    judgement: Judgement
    is_truncated: bool
    is_written: tuple[bool, ...] | None = None
    """Which target tokens the policy wrote; None: all."""
    is_further: bool = False
    """Whether its group took the place of one without spread."""


@dataclass(frozen=True, kw_only=True)
class GrpoObjective(PolicyGradient):
    """``trainer_variant: grpo``."""

    reuse: Reuse
    group_rules: GroupRules
    policy_rules: PolicyRules
    logprob_rules: LogprobRules
    rewards: tuple[Reward, ...]
    vocabulary: Vocabulary
    world: EpisodeRunner | None = None
    """Where completions have several turns; it pays them, then, and not ``rewards``."""

    def make_segments(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext
    ) -> TrainingTargets:
        """``num_rollouts`` segments per sample.

        Errors: ``rewards-all-failed``, ``logprobs-misfit``, ``episodes-failed``.
        """
        repeated, seconds, num_tokens = self.reuse.repeat(samples), dict[str, float](), None
        if self.world is None:
            made = self._complete(repeated, rollouts, context, seconds)
        else:
            made = self._judge(repeated, note_episodes(self.world, rollouts, context), rollouts, context, seconds)
            num_tokens = sum(rollout.num_tokens for rollout in rollouts)
            note_pace(rollouts, [one.judgement.total for one in made], self.vocabulary, context)
        if self.group_rules.max_rounds:
            made, num_further = self._with_spread(made, context, seconds)
            num_tokens = num_further + sum(len(rollout.response_token_ids) for rollout in rollouts)
        judged, rollouts = [one.judgement for one in made], [one.rollout for one in made]
        advantages = self._advantages(judged, context)
        segments = [self._segment(*pair) for pair in zip(made, advantages, strict=True)]
        segments = self.with_logprobs(segments, rollouts, context)
        if self.rewards or self.world is not None:
            context.log(
                "rewarded",
                step=context.step,
                seconds={name: rounded(taken) for name, taken in seconds.items()},
                rewards=[judgement.total for judgement in judged],
                failures=[failure for judgement in judged for failure in judgement.failures][:NUM_FAILURES],
            )
        reports = self._reports(made, group_size=self.reuse.num_rollouts)
        return TrainingTargets(
            segments=self.reuse.group(segments),
            reports=tuple(reports),
            completions=tuple((one.sample, one.rollout) for one in made) if self.group_rules.max_rounds else None,
            num_rollout_tokens=num_tokens,
        )

    def summarize(self, reports: Sequence[CompletionReport]) -> dict[str, float]:
        """Rewards, lengths and rates; ``further_group_rate`` where groups are replaced."""
        means = summarize_completions(reports, [reward.name for reward in self.rewards])
        if means and self.group_rules.max_rounds:
            means["further_group_rate"] = fmean(report.is_further for report in reports)
        return means

    def evaluate(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext) -> Evaluated:
        """Rewards of one completion each; some answers are written down."""
        if self.world is None:
            made = self._complete(samples, rollouts, context)
        else:
            made = self._judge(samples, note_part(self.world, rollouts, context), rollouts, context)
        reports = self._reports(made, group_size=1)
        metrics, parts = self.summarize(reports), parts_of(reports, [reward.name for reward in self.rewards])
        for name in ("flat_group_rate", "further_group_rate"):
            metrics.pop(name, None)
        totals = [one.judgement.total for one in made[:NUM_SHOWN]]
        answers = [self.vocabulary.text(one.rollout.response_token_ids) for one in made[:NUM_SHOWN]]
        record = describe_answers(samples, answers, {"reward": totals})
        return Evaluated(metrics=metrics | {"num_scenes": float(len(samples))}, record=record, parts=parts)

    def _with_spread(
        self, made: Sequence[Completion], context: ObjectiveContext, seconds: dict[str, float]
    ) -> tuple[list[Completion], int]:
        """The completions, groups of equal rewards replaced by those of further samples; and the tokens of these.

        The first further group with spread takes the first place without, and so on. All ranks go as many rounds.
        """
        groups, num_tokens = list(self.reuse.group(made)), 0
        for _ in range(self.group_rules.max_rounds):
            flat = [place for place, group in enumerate(groups) if _is_flat(group)]
            if not any(context.ranks.gather(len(flat))):
                break
            further = context.further(len(flat))
            if not any(context.ranks.gather(len(further))):
                break
            num_tokens += sum(len(rollout.response_token_ids) for _, rollout in further)
            asked, written = [s for s, _ in further], [r for _, r in further]
            more = self._complete(asked, written, context, seconds, may_all_fail=True)
            more = [replace(one, is_further=True) for one in more]
            for place, group in zip(flat, (group for group in self.reuse.group(more) if not _is_flat(group))):
                groups[place] = group
        return [one for group in groups for one in group], num_tokens

    def _complete(
        self,
        samples: Sequence[Sample],
        rollouts: Sequence[Rollout],
        context: ObjectiveContext,
        seconds: dict[str, float] | None = None,
        *,
        may_all_fail: bool = False,
    ) -> list[Completion]:
        judged = judge_all(
            [self.vocabulary.text(rollout.response_token_ids) for rollout in rollouts],
            samples,
            self.rewards,
            seconds=seconds,
            offered=_offered([rollout.sampled_ids for rollout in rollouts], context),
            may_all_fail=may_all_fail,
        )
        return [
            Completion(sample=s, rollout=r, judgement=j, is_truncated=r.stop_id is None)
            for s, r, j in zip(samples, rollouts, judged, strict=True)
        ]

    def _judge(
        self,
        samples: Sequence[Sample],
        episodes: Sequence[Trajectory],
        rollouts: Sequence[Rollout],
        context: ObjectiveContext,
        seconds: dict[str, float] | None = None,
    ) -> list[Completion]:
        """Episodes, paid by their environment, or by the functions that judge their last turns; one that failed is left
        out, as if its reward had. Errors: as ``judge_all``.
        """
        whole = [one for one in episodes if not one.failure] if self.rewards else []
        token_ids = [one.last_turn_ids for one in whole]
        answers, asked = [self.vocabulary.text(ids) for ids in token_ids], [one.sample for one in whole]
        offered = _offered(token_ids, context) | offered_environments(whole)
        judged = iter(judge_all(answers, asked, self.rewards, seconds=seconds, offered=offered) if whole else ())
        judgements = [
            next(judged) if self.rewards and not one.failure else _paid(one, num_rewards=len(self.rewards))
            for one in episodes
        ]
        return [_completion(*four) for four in zip(samples, episodes, rollouts, judgements, strict=True)]

    def _reports(self, made: Sequence[Completion], *, group_size: int) -> list[CompletionReport]:
        reports = make_reports([one.rollout for one in made], [one.judgement for one in made], group_size=group_size)
        lens = [sum(one.is_written or ()) or report.response_len for one, report in zip(made, reports, strict=True)]
        return [
            replace(report, is_truncated=one.is_truncated, response_len=length, is_further=one.is_further)
            for one, report, length in zip(made, reports, lens, strict=True)
        ]

    def _advantages(self, judged: Sequence[Judgement], context: ObjectiveContext) -> list[float]:
        """Of each completion. The standard deviation of all rewards is over all ranks."""
        mine = self.reuse.group([judgement.total for judgement in judged])
        ranks = context.ranks.gather(mine) if self.group_rules.scale == "batch" else [mine]
        place = context.ranks.rank if self.group_rules.scale == "batch" else 0
        first = sum(len(groups) for groups in ranks[:place])
        everyone = [group for groups in ranks for group in groups]
        advantages = group_advantages(everyone, baseline=self.group_rules.baseline, scale=self.group_rules.scale)
        return [advantage for group in advantages[first : first + len(mine)] for advantage in group]

    def _segment(self, made: Completion, advantage: float) -> Segment:
        policy = PolicyTarget(
            advantages=(advantage,) * len(made.rollout.sampled_ids),
            is_masked=made.judgement.total is None or (self.group_rules.mask_truncated and made.is_truncated),
            is_written=made.is_written,
        )
        return policy_segment(made.sample, made.rollout, policy)


def _offered(token_ids: Sequence[Sequence[int]], context: ObjectiveContext) -> dict[str, object]:
    """What TRL's functions may ask for; ``token_ids`` with their stop tokens."""
    return {"completion_ids": [list(ids) for ids in token_ids], "trainer_state": context.trainer_state}


def _is_flat(group: Sequence[Completion]) -> bool:
    return is_flat([one.judgement.total for one in group])


def _paid(episode: Trajectory, *, num_rewards: int) -> Judgement:
    """What no function judges: an episode that failed, and one that its environment paid."""
    failures = (episode.failure,) if episode.failure else ()
    total = None if failures else episode.total_return
    return Judgement(values=(None,) * num_rewards, total=total, failures=failures)


def _completion(sample: Sample, trajectory: Trajectory, rollout: Rollout, judgement: Judgement) -> Completion:
    return Completion(
        sample=sample,
        rollout=rollout,
        judgement=judgement,
        is_truncated=not trajectory.is_finished,
        is_written=trajectory.written,
    )
