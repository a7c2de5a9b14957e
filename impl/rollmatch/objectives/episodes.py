"""Rollouts that are whole episodes, as objectives read them."""

from collections.abc import Sequence
from operator import itemgetter
from typing import cast

from rollmatch.environments.coroutines import CoroutineEnvironment
from rollmatch.environments.limits import check_share
from rollmatch.environments.trajectory import EpisodeRollout, Trajectory
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.protocol import GenerationContext
from rollmatch.records import Rollout, rounded
from rollmatch.rollout.episodes import EpisodeRunner

NUM_SHOWN = 5
"""Actions that were none, and failures, of a window, that are written down."""
NUM_DRAWN = 32
"""Episodes of a window whose turns are written down one by one."""
LONGEST_TEXT = 2000
"""Characters of a message of a chat that is written down."""


def note_episodes(world: EpisodeRunner, rollouts: Sequence[Rollout], context: GenerationContext) -> list[Trajectory]:
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


def note_part(world: EpisodeRunner, rollouts: Sequence[Rollout], context: GenerationContext) -> list[Trajectory]:
    """As ``note_episodes``, of what all ranks hold alike: each writes down its part of it."""
    note_episodes(world, rollouts[context.ranks.rank :: context.ranks.learner_world_size], context)
    return [one.trajectory for one in _episodes_of(rollouts)]


def check_failed(world: EpisodeRunner, made: Sequence[Trajectory], context: GenerationContext) -> None:
    """End the run where too many failed. Called by all ranks. Errors: ``episodes-failed``."""
    failures = [one.failure for one in made if one.failure]
    check_share(failures, len(made), failed_share=world.failed_share, gather=context.ranks.gather)


def note_pace(
    rollouts: Sequence[Rollout], rewards: Sequence[float | None], vocabulary: Vocabulary, context: GenerationContext
) -> None:
    """Write down what took how long, and the best and the worst episode as chats. ``rewards``: None of a failed one."""
    episodes = _episodes_of(rollouts)
    began = min((one.times[0].requested for one in episodes), default=0.0)
    tools: dict[str, list[float]] = {}
    for name, seconds in (called for one in episodes for times in one.times for called in times.tools):
        tools.setdefault(name, []).append(seconds)
    judged = [pair for pair in zip(episodes, rewards, strict=True) if pair[1] is not None]
    failures = [one.trajectory.failure for one in episodes if one.trajectory.failure]
    chats = [max(judged, key=itemgetter(1)), min(judged, key=itemgetter(1))] if judged else []
    context.log(
        "episodes",
        step=context.step,
        durations=[rounded(one.times[-1].replied - one.times[0].requested) for one in episodes],
        engine_s=rounded(sum(turn.written - turn.requested for one in episodes for turn in one.times)),
        environment_s=rounded(sum(turn.replied - turn.written for one in episodes for turn in one.times)),
        tools={name: [len(seconds), rounded(sum(seconds))] for name, seconds in sorted(tools.items())},
        shown=[_pace(*pair, began=began) for pair in list(zip(episodes, rewards, strict=True))[:NUM_DRAWN]],
        num_failed=len(failures),
        failures=failures[:NUM_SHOWN],
        chats=[_chat(one, reward, vocabulary) for one, reward in chats],
    )


def offered_environments(made: Sequence[Trajectory]) -> dict[str, object]:
    """``environments``, as TRL's functions ask for them: instances of the class among the tools, if there is one.

    Errors: ``replay-differs``.
    """
    found = [one.environment.instance() for one in made if isinstance(one.environment, CoroutineEnvironment)]
    return {"environments": found} if found and all(one is not None for one in found) else {}


def _pace(episode: EpisodeRollout, reward: float | None, *, began: float) -> dict[str, object]:
    turns = [
        [
            *(rounded(at - began) for at in (turn.requested, turn.written, turn.replied)),
            [name for name, _ in turn.tools],
        ]
        for turn in episode.times
    ]
    return {"sample_id": episode.trajectory.sample.sample_id, "reward": reward, "turns": turns}


def _chat(episode: EpisodeRollout, reward: float | None, vocabulary: Vocabulary) -> dict[str, object]:
    """An episode's texts, each cut to ``LONGEST_TEXT`` characters."""
    made, messages, end = episode.trajectory, list[tuple[str, str]](), 0
    for turn in made.turns:
        if end < turn.start:
            messages.append(("environment", vocabulary.text(made.token_ids[end : turn.start])))
        messages.append(("policy", vocabulary.text(made.token_ids[turn.start : turn.stop])))
        end = turn.stop
    asked = [(role, text) for role, text in made.sample.messages]
    return {
        "sample_id": made.sample.sample_id,
        "origin": made.sample.origin,
        "reward": reward,
        "messages": [[role, text.strip()[:LONGEST_TEXT]] for role, text in (*asked, *messages)],
    }


def _episodes_of(rollouts: Sequence[Rollout]) -> list[EpisodeRollout]:
    assert all(isinstance(one, EpisodeRollout) for one in rollouts), "with an environment a rollout is an episode"
    return [cast(EpisodeRollout, one) for one in rollouts]
