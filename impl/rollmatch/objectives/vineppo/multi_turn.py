"""Trajectories of several turns in an environment; and how such an episode is continued.

The first turn of each episode is generated as any response. The others are generated here, one wave per turn with all
live episodes in it. All learner ranks take part in as many waves, so that none waits for another's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from rollmatch.environments.continuation import ContinuationRequest, seed_from
from rollmatch.environments.environment import (
    Environment,
    FailedEnvironment,
    MakeEnvironment,
    begin,
    generator_of,
)
from rollmatch.environments.episode import Episode, EpisodeRules, Reply, resume
from rollmatch.environments.limits import DEFAULTS, EnvironmentLimits, EpisodeFailed, check_share
from rollmatch.environments.trajectory import Trajectory
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.protocol import ObjectiveContext
from rollmatch.records import Rollout, RolloutRequest, Sample
from rollmatch.rollout.backend import Decoding

NUM_SHOWN = 5
"""Actions that were none, and failures, of a window, that are written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode that is over."""

    trajectory: Trajectory
    rollout: Rollout
    """The same as one response, observations included; its prompt as the engine saw it."""
    num_tokens: int
    """Of all turns, counted as those of rollouts are: without stop tokens."""
    unparsable: str = ""


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """The environment of a run, and the rules of its episodes."""

    make: MakeEnvironment
    vocabulary: Vocabulary
    prompt_of: Callable[[Sample], tuple[int, ...]]
    reply: Reply
    max_turns: int
    max_response_tokens: int
    run_seed: int
    limits: EnvironmentLimits = DEFAULTS
    failed_share: float = 0.0
    """Largest share of failed episodes of a window, and of the continuations of a wave."""

    def rules_of(self, decoding: Decoding) -> EpisodeRules:
        """Of episodes whose turns are decoded so."""
        return EpisodeRules(
            vocabulary=self.vocabulary,
            reply=self.reply,
            max_turns=self.max_turns,
            max_turn_tokens=decoding.max_new_tokens,
            max_response_tokens=self.max_response_tokens,
            limits=self.limits,
        )

    def play(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext) -> list[Played]:
        """First turns -> whole episodes, in order. Called by all ranks.

        Errors: those of ``Episode.take``, ``episodes-failed``.
        """
        rules = self.rules_of(context.decoding)
        episodes = [self._begin(*pair, rules) for pair in zip(samples, rollouts, strict=True)]
        for episode, rollout in zip(episodes, rollouts, strict=True):
            episode.take(rollout)
        play_episodes(episodes, context, context.decoding, name=f"{context.step}.{context.ranks.rank}.t")
        played = [_played(*pair) for pair in zip(episodes, rollouts, strict=True)]
        unparsable = [one.unparsable for one in played if one.unparsable]
        failures = [one.trajectory.failure for one in played if one.trajectory.failure]
        context.log(
            "played",
            step=context.step,
            num_episodes=len(played),
            num_turns=sum(len(one.trajectory.turns) for one in played),
            num_tokens=sum(sum(one.trajectory.written) for one in played),
            finished=sum(one.trajectory.is_finished for one in played),
            num_unparsable=len(unparsable),
            unparsable=unparsable[:NUM_SHOWN],
            num_failed=len(failures),
            failures=failures[:NUM_SHOWN],
        )
        self.check_failed([one.trajectory for one in played], context)
        return played

    def check_failed(self, made: Sequence[Trajectory], context: ObjectiveContext) -> None:
        """End the run where too many failed. Called by all ranks. Errors: ``episodes-failed``."""
        failures = [one.failure for one in made if one.failure]
        check_share(failures, len(made), failed_share=self.failed_share, gather=context.ranks.gather)

    def share(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext) -> list[Played]:
        """As ``play``, of what all ranks hold alike: each plays its part of it, and knows all."""
        rank, world_size = context.ranks.rank, context.ranks.learner_world_size
        mine = slice(rank, None, world_size)
        parts = context.ranks.gather(self.play(samples[mine], rollouts[mine], context))
        return [parts[place % world_size][place // world_size] for place in range(len(samples))]

    def _begin(self, sample: Sample, rollout: Rollout, rules: EpisodeRules) -> Episode:
        chance = generator_of(self.run_seed, sample.sample_id, rollout.request_id)
        try:
            begun, _ = begin(self.make, sample, run_seed=self.run_seed, limits=self.limits)
            environment: Environment = begun.clone(chance)
        except EpisodeFailed as error:
            environment = FailedEnvironment(error)
        return Episode(
            sample=sample,
            prompt_token_ids=self.prompt_of(sample),
            policy_version=rollout.policy_version,
            environment=environment,
            rules=rules,
            seed=seed_from(self.run_seed, sample.sample_id, rollout.request_id),
        )


class MultiTurn:
    """Continues from the middle of an episode, by the rule that sampled it; a ``Continuer``."""

    def __init__(self, world: EpisodeRunner, context: ObjectiveContext, *, logprobs: bool) -> None:
        self.world, self.context = world, context
        self.decoding = replace(context.decoding, logprobs=logprobs)
        self.rules = world.rules_of(self.decoding)
        self.max_new_tokens = world.max_response_tokens
        self._calls = count()

    def continue_states(self, requests: Sequence[ContinuationRequest]) -> list[Trajectory]:
        """As the protocol: one call of the rollout side per turn, for all."""
        episodes = [resume(request.state, self.rules, seed=request.seed) for request in requests]
        name = f"{self.context.step}.{self.context.ranks.rank}.c{next(self._calls)}"
        play_episodes(episodes, self.context, self.decoding, name=name)
        made = [episode.trajectory() for episode in episodes]
        self.world.check_failed(made, self.context)
        return made


def play_episodes(episodes: Sequence[Episode], context: ObjectiveContext, decoding: Decoding, *, name: str) -> None:
    """Play all to their ends: a wave per turn."""
    request_of = partial(_request, name=name)
    while any(context.ranks.gather(any(not episode.is_over for episode in episodes))):
        live = [(place, episode) for place, episode in enumerate(episodes) if not episode.is_over]
        rollouts = context.generate([request_of(place, episode) for place, episode in live], decoding)
        for (_, episode), rollout in zip(live, rollouts, strict=True):
            episode.take(rollout)


def _request(place: int, episode: Episode, *, name: str) -> RolloutRequest:
    number = episode.turn.number
    return RolloutRequest(
        request_id=f"{name}.{place}.{number}",
        sample=episode.sample,
        prompt_token_ids=episode.prompt_token_ids,
        prefix_token_ids=tuple(episode.token_ids),
        max_new_tokens=episode.remaining_tokens,
        seed=seed_from(episode.seed, number),
        policy_version=episode.policy_version,
    )


def _played(episode: Episode, first: Rollout) -> Played:
    trajectory, stop_ids = episode.trajectory(), episode.rules.vocabulary.stop_ids
    ids = trajectory.token_ids
    stop_id = ids[-1] if ids[-1] in stop_ids else None
    whole = replace(
        first,
        response_token_ids=ids if stop_id is None else ids[:-1],
        stop_id=stop_id,
        response_logprobs=trajectory.logprobs,
    )
    num_tokens = sum(turn.stop - turn.start - (ids[turn.stop - 1] in stop_ids) for turn in trajectory.turns)
    return Played(trajectory=trajectory, rollout=whole, num_tokens=num_tokens, unparsable=episode.unparsable)
