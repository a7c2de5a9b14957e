"""Trajectories of one response to one prompt, paid at its end; and how such a response is continued."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType

from rollmatch.environments.continuation import ContinuationRequest
from rollmatch.environments.trajectory import State, Trajectory
from rollmatch.errors import TargetError
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.episodes import offered_environments
from rollmatch.objectives.grpo.reward import Reward, judge_all
from rollmatch.objectives.protocol import GenerationContext
from rollmatch.records import Rollout, RolloutRequest, Sample


@dataclass(frozen=True, kw_only=True)
class RewardRules:
    """What a response is paid."""

    rewards: tuple[Reward, ...]
    vocabulary: Vocabulary
    unfinished_return: float | None
    """Of a response that ran into its limit; None: as any other."""

    def totals(
        self,
        answers: Sequence[tuple[int, ...]],
        samples: Sequence[Sample],
        *,
        sampled: Sequence[tuple[int, ...]],
        environments: Mapping[str, object] = MappingProxyType({}),
    ) -> list[float]:
        """Of whole responses, without stop tokens; ``sampled``: with them; ``environments``: ``offered_environments``.

        Errors: ``reward-missing``, ``rewards-all-failed``.
        """
        texts = [self.vocabulary.text(ids) for ids in answers]
        offered = {"completion_ids": [list(ids) for ids in sampled], **environments}
        judged = judge_all(texts, samples, self.rewards, offered=offered)
        totals = []
        for sample, judgement in zip(samples, judged, strict=True):
            if judgement.total is None:
                raise TargetError(
                    judgement.failures[0],
                    code="reward-missing",
                    key=sample.origin,
                    remedy="Correct the reward function.",
                )
            totals.append(judgement.total)
        return totals

    def paid(self, made: Sequence[Trajectory]) -> list[Trajectory]:
        """Episodes, each paid for its last turn; as they are where there are no rewards. Errors: as ``totals``."""
        judged = [one for one in made if not one.failure] if self.rewards else []
        turns = [one.last_turn_ids for one in judged]
        offered = offered_environments(judged)
        totals = iter(self.totals(turns, [one.sample for one in judged], sampled=turns, environments=offered))
        return [self._paid(one, next(totals)) if self.rewards and not one.failure else one for one in made]

    def _paid(self, one: Trajectory, total: float) -> Trajectory:
        if not one.is_finished and self.unfinished_return is not None:
            total = self.unfinished_return
        return replace(one, rewards=(*one.rewards, (len(one.token_ids), total)))

    def trajectories(self, states: Sequence[State], rollouts: Sequence[Rollout]) -> list[Trajectory]:
        """The trajectories that rollouts continued from their states. Errors: as ``totals``."""
        pairs = [*zip(states, rollouts, strict=True)]
        whole = [state.prefix_token_ids + rollout.response_token_ids for state, rollout in pairs]
        sampled = [state.prefix_token_ids + rollout.sampled_ids for state, rollout in pairs]
        totals = self.totals(whole, [state.sample for state in states], sampled=sampled)
        return [self._paid(_unpaid(*pair), total) for pair, total in zip(pairs, totals, strict=True)]


def _unpaid(state: State, rollout: Rollout) -> Trajectory:
    logprobs = rollout.response_logprobs
    return Trajectory(
        sample=state.sample,
        prompt_token_ids=state.prompt_token_ids,
        token_ids=state.prefix_token_ids + rollout.sampled_ids,
        rewards=(),
        policy_version=rollout.policy_version,
        is_finished=rollout.stop_id is not None,
        logprobs=None if logprobs is None else (0.0,) * state.position + logprobs,
    )


class SingleTurn:
    """Continues from the middle of a response, by the rule that sampled it; a ``Continuer``."""

    def __init__(self, rewards: RewardRules, context: GenerationContext, *, logprobs: bool) -> None:
        self.rewards, self.context = rewards, context
        self.decoding = replace(context.decoding, logprobs=logprobs)
        self.max_new_tokens = context.decoding.max_new_tokens
        self._numbers = count()

    def continue_states(self, requests: Sequence[ContinuationRequest]) -> list[Trajectory]:
        """As the protocol: one call of the rollout side for all."""
        rollouts = self.context.generate([self._request(request) for request in requests], self.decoding)
        return self.rewards.trajectories([request.state for request in requests], rollouts)

    def _request(self, request: ContinuationRequest) -> RolloutRequest:
        state = request.state
        return RolloutRequest(
            request_id=f"{self.context.step}.{self.context.ranks.rank}.c{next(self._numbers)}",
            sample=state.sample,
            prompt_token_ids=state.prompt_token_ids,
            prefix_token_ids=state.prefix_token_ids,
            max_new_tokens=state.budget_left(self.max_new_tokens),
            seed=request.seed,
            policy_version=state.policy_version,
        )


def starts(
    samples: Sequence[Sample], rollouts: Sequence[Rollout], prompt_of: Callable[[Sample], tuple[int, ...]]
) -> list[State]:
    """The prompts that responses were made to, as states."""
    return [
        State(
            sample=sample,
            sample_id=sample.sample_id,
            prompt_token_ids=prompt_of(sample),
            prefix_token_ids=(),
            policy_version=rollout.policy_version,
        )
        for sample, rollout in zip(samples, rollouts, strict=True)
    ]
