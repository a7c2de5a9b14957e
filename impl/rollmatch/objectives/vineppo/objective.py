"""VinePPO as an objective: each step of a response is judged by the values of the states before and after it.

Its two variants differ in where values come from (``objectives.vineppo.value``, ``search``) and in nothing else.
Continuations estimate values; they are never learnt from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rollmatch.data import Reuse
from rollmatch.environments.continuation import ContinuationRequest, Continuer, Waves
from rollmatch.environments.trajectory import Cuts, Trajectory
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.answers import describe_answers
from rollmatch.objectives.episodes import note_episodes, note_pace, note_part
from rollmatch.objectives.grpo.loss import PolicyRules
from rollmatch.objectives.grpo.segments import policy_segment
from rollmatch.objectives.policy_gradient import LogprobRules, PolicyGradient
from rollmatch.objectives.protocol import Evaluated, GenerationContext, ObjectiveContext, TrainingTargets
from rollmatch.objectives.vineppo.advantage import Normalization, normalize, spread, step_advantages
from rollmatch.objectives.vineppo.multi_turn import MultiTurn
from rollmatch.objectives.vineppo.single_turn import RewardRules, SingleTurn, starts
from rollmatch.objectives.vineppo.split import Splitter
from rollmatch.objectives.vineppo.value import Valued, Valuer
from rollmatch.records import PolicyTarget, Rollout, Sample, Segment, rounded
from rollmatch.rollout.episodes import EpisodeRunner
from rollmatch.rollout.source import RolloutSource

NUM_SHOWN = 128
"""Answers of an evaluation, and trajectories of a window, that are written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryReport:
    """What one response was worth, step by step."""

    total_return: float
    response_len: int
    is_truncated: bool
    values: tuple[float, ...]
    """[S] before each step."""
    step_advantages: tuple[float, ...]
    """[S] before they were normalised."""
    num_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """What a window's values cost on this rank; stands once among the reports of its trajectories."""

    num_states: int
    num_continuations: int
    continuation_tokens: int
    num_failed: int = 0
    """Episodes whose environment failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedWindow:
    """The responses of this rank, with the values of their states."""

    made: list[Trajectory]
    """One per rollout."""
    cuts: list[Cuts]
    valued: list[Valued]
    """As ``cuts``, of each of ``trajectories``."""
    num_continuations: int
    continuation_tokens: int

    @property
    def trajectories(self) -> list[Trajectory]:
        """Those whose environment did not fail."""
        return [one for one in self.made if not one.failure]


@dataclass(frozen=True, kw_only=True)
class VinePpoObjective(PolicyGradient):
    """``trainer_variant: vineppo`` and ``vineppo_mcts``."""

    reuse: Reuse
    policy_rules: PolicyRules
    logprob_rules: LogprobRules
    vocabulary: Vocabulary
    rewards: RewardRules
    splitter: Splitter
    valuer: Valuer
    normalization: Normalization
    run_seed: int
    prompt_of: Callable[[Sample], tuple[int, ...]]
    world: EpisodeRunner | None = None
    """Where responses have several turns; its steps give rewards, and ``rewards``, if any, judge last turns."""
    reads_logprobs: bool
    """Whether steps or the search go by log-probabilities."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether the engine returns each sampled token's log-probability."""
        return self.reads_logprobs or self.logprob_rules.wants_sampled

    def make_segments(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext
    ) -> TrainingTargets:
        """``num_rollouts`` segments per sample. Errors: those of ``judge``."""
        judged: JudgedWindow = context.early or self.judge(self.reuse.repeat(samples), rollouts, context)
        made, trajectories, cuts = judged.made, judged.trajectories, judged.cuts
        reports = [_report(*three) for three in zip(trajectories, cuts, judged.valued, strict=True)]
        rows = [spread(report.step_advantages, bounds) for report, bounds in zip(reports, cuts, strict=True)]
        written = [one.written for one in trajectories]
        advantages = iter(normalize(rows, written, self.normalization, context.ranks.sum))
        segments = [
            self._segment(one, rollout, None if one.failure else next(advantages))
            for one, rollout in zip(made, rollouts, strict=True)
        ]
        segments = self.with_logprobs(segments, rollouts, context)
        cost = WindowReport(
            num_states=sum(len(one.values) for one in judged.valued),
            num_continuations=judged.num_continuations,
            continuation_tokens=judged.continuation_tokens,
            num_failed=len(made) - len(trajectories),
        )
        self._note(context, trajectories, reports, cost)
        return TrainingTargets(
            segments=self.reuse.group(segments),
            reports=(*reports, cost),
            num_rollout_tokens=sum(rollout.num_tokens for rollout in rollouts),
        )

    def judge(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: GenerationContext) -> JudgedWindow:
        """What responses earned, and the values of their states; one of ``samples`` per rollout. Called by all ranks.

        Needs the weights that wrote the responses. Errors: those of splitters, values and rewards.
        """
        if self.world is None:
            made = self._paid(samples, rollouts)
        else:
            made = self.rewards.paid(note_episodes(self.world, rollouts, context))
            returns = [None if one.failure else one.total_return for one in made]
            note_pace(rollouts, returns, self.vocabulary, context)
        trajectories = [one for one in made if not one.failure]
        cuts = [self.splitter.cuts(trajectory) for trajectory in trajectories]
        counted = CostedValues(self._continuer(context))
        waves = Waves(counted, context.ranks, run_seed=self.run_seed, step=context.step)
        valued = self.valuer.values_of(trajectories, cuts, waves)
        return JudgedWindow(
            made=made,
            cuts=cuts,
            valued=valued,
            num_continuations=counted.num_continuations,
            continuation_tokens=counted.num_tokens,
        )

    def judge_early(
        self, source: RolloutSource, step: int, samples: Sequence[Sample], rollouts: Sequence[Rollout]
    ) -> JudgedWindow:
        """``judge``, beside learning from an earlier window."""
        context = GenerationContext(
            step=step,
            ranks=source.ranks,
            decoding=source.decoding,
            generate=source.generate,
            play=source.play,
            log=source.journal.write,
        )
        return self.judge(samples, rollouts, context)

    def summarize(self, reports: Sequence[object]) -> dict[str, float]:
        """Returns, lengths, what values were and what they cost."""
        mine = [report for report in reports if isinstance(report, TrajectoryReport)]
        costs = [report for report in reports if isinstance(report, WindowReport)]
        if not mine:
            return {}
        num_failed = sum(cost.num_failed for cost in costs)
        return {
            "reward": fmean(report.total_return for report in mine),
            "truncated_rate": fmean(report.is_truncated for report in mine),
            "response_len": fmean(report.response_len for report in mine),
            "steps": fmean(len(report.values) for report in mine),
            "prompt_value": fmean(report.values[0] for report in mine),
            "advantage_size": fmean(abs(a) for report in mine for a in report.step_advantages),
            **({"reward_failed_rate": num_failed / (num_failed + len(mine))} if self.world else {}),
            **({"turns": fmean(report.num_turns for report in mine)} if self.world else {}),
            "continuations": float(sum(cost.num_continuations for cost in costs)),
            "continuation_tokens": float(sum(cost.continuation_tokens for cost in costs)),
            "states_per_continuation": _share(costs),
        }

    def evaluate(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext) -> Evaluated:
        """Returns of one response each; some are written down."""
        if self.world is None:
            made = self._paid(samples, rollouts)
        else:
            made = self.rewards.paid(note_part(self.world, rollouts, context))
        returns = [None if one.failure else one.total_return for one in made]
        known = [value for value in returns if value is not None]
        metrics = {"reward": fmean(known) if known else 0.0, "num_scenes": float(len(samples))}
        answers = [self.vocabulary.text(rollout.response_token_ids) for rollout in rollouts[:NUM_SHOWN]]
        record = describe_answers(samples, answers, {"reward": returns})
        parts = [(0.0, 0.0) if each is None else (each, 1.0) for each in returns]
        return Evaluated(metrics=metrics, record=record, parts={"reward": parts})

    def _paid(self, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> list[Trajectory]:
        """Responses of one turn, paid by the reward functions."""
        return self.rewards.trajectories(starts(samples, rollouts, self.prompt_of), rollouts)

    def _continuer(self, context: GenerationContext) -> Continuer:
        if self.world is not None:
            return PaidContinuer(MultiTurn(self.world, context, logprobs=self.reads_logprobs), self.rewards)
        return SingleTurn(self.rewards, context, logprobs=self.reads_logprobs)

    def _segment(self, made: Trajectory, rollout: Rollout, advantages: tuple[float, ...] | None) -> Segment:
        """None: its environment failed, and it teaches nothing."""
        policy = PolicyTarget(
            advantages=advantages or (0.0,) * len(made.token_ids),
            is_masked=advantages is None,
            is_written=made.written if made.turns else None,
        )
        return policy_segment(made.sample, rollout, policy)

    def _note(
        self,
        context: ObjectiveContext,
        trajectories: Sequence[Trajectory],
        reports: Sequence[TrajectoryReport],
        cost: WindowReport,
    ) -> None:
        shown = reports[:NUM_SHOWN]
        context.log(
            "valued",
            step=context.step,
            num_states=cost.num_states,
            num_continuations=cost.num_continuations,
            continuation_tokens=cost.continuation_tokens,
            sample_ids=[one.sample.sample_id for one in trajectories],
            returns=[report.total_return for report in reports],
            values=[[rounded(value) for value in report.values] for report in shown],
            advantages=[[rounded(a) for a in report.step_advantages] for report in shown],
        )


class PaidContinuer:
    """A continuer of episodes that reward functions judge."""

    def __init__(self, continuer: Continuer, rewards: RewardRules) -> None:
        self.continuer, self.rewards = continuer, rewards
        self.max_new_tokens = continuer.max_new_tokens

    def continue_states(self, requests: Sequence[ContinuationRequest]) -> list[Trajectory]:
        """As the protocol."""
        return self.rewards.paid(self.continuer.continue_states(requests))


class CostedValues:
    """A continuer that counts its calls."""

    def __init__(self, continuer: Continuer) -> None:
        self.continuer = continuer
        self.max_new_tokens = continuer.max_new_tokens
        self.num_continuations = self.num_tokens = 0

    def continue_states(self, requests: Sequence[ContinuationRequest]) -> list[Trajectory]:
        """As the protocol."""
        made = self.continuer.continue_states(requests)
        self.num_continuations += len(made)
        for request, one in zip(requests, made):  # ``Waves`` compares their numbers
            self.num_tokens += sum(one.written[request.state.position :])
        return made


def _report(trajectory: Trajectory, cuts: Cuts, valued: Valued) -> TrajectoryReport:
    return TrajectoryReport(
        total_return=trajectory.total_return,
        response_len=sum(trajectory.written) - (trajectory.is_finished and not trajectory.turns),
        num_turns=len(trajectory.turns) or 1,
        is_truncated=not trajectory.is_finished,
        values=valued.values,
        step_advantages=step_advantages(valued.values, trajectory.step_rewards(cuts)),
    )


def _share(costs: Sequence[WindowReport]) -> float:
    """States per continuation; above 1 / K where states were shared.

    >>> cost = WindowReport(num_states=6, num_continuations=8, continuation_tokens=0)
    >>> _share([cost, cost]), _share([])
    (0.75, 0.0)
    """
    num = sum(cost.num_continuations for cost in costs)
    return sum(cost.num_states for cost in costs) / num if num else 0.0
