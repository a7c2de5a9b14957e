"""Rollouts that are whole episodes, as objectives read them."""

from collections.abc import Sequence
from typing import cast

from rollmatch.environments.limits import check_share
from rollmatch.environments.trajectory import EpisodeRollout, Trajectory
from rollmatch.objectives.protocol import ObjectiveContext
from rollmatch.records import Rollout
from rollmatch.rollout.episodes import EpisodeRunner

NUM_SHOWN = 5
"""Actions that were none, and failures, of a window, that are written down."""


def note_episodes(world: EpisodeRunner, rollouts: Sequence[Rollout], context: ObjectiveContext) -> list[Trajectory]:
    """The episodes of this rank, written down. Called by all ranks. Errors: ``episodes-failed``."""
    episodes = _episodes_of(rollouts)
    made = [one.trajectory for one in episodes]
    unparsable = [one.unparsable for one in episodes if one.unparsable]
    failures = [one.failure for one in made if one.failure]
    context.log(
        "played",
        step=context.step,
        num_episodes=len(made),
        num_turns=sum(len(one.turns) for one in made),
        num_tokens=sum(sum(one.written) for one in made),
        finished=sum(one.is_finished for one in made),
        num_unparsable=len(unparsable),
        unparsable=unparsable[:NUM_SHOWN],
        num_failed=len(failures),
        failures=failures[:NUM_SHOWN],
        policy_versions=[one.policy_versions for one in episodes],
    )
    check_failed(world, made, context)
    return made


def note_part(world: EpisodeRunner, rollouts: Sequence[Rollout], context: ObjectiveContext) -> list[Trajectory]:
    """As ``note_episodes``, of what all ranks hold alike: each writes down its part of it."""
    note_episodes(world, rollouts[context.ranks.rank :: context.ranks.learner_world_size], context)
    return [one.trajectory for one in _episodes_of(rollouts)]


def check_failed(world: EpisodeRunner, made: Sequence[Trajectory], context: ObjectiveContext) -> None:
    """End the run where too many failed. Called by all ranks. Errors: ``episodes-failed``."""
    failures = [one.failure for one in made if one.failure]
    check_share(failures, len(made), failed_share=world.failed_share, gather=context.ranks.gather)


def _episodes_of(rollouts: Sequence[Rollout]) -> list[EpisodeRollout]:
    assert all(isinstance(one, EpisodeRollout) for one in rollouts), "with an environment a rollout is an episode"
    return [cast(EpisodeRollout, one) for one in rollouts]
