"""How an episode of several turns is continued from its middle."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from rollmatch.environments.continuation import ContinuationRequest
from rollmatch.environments.episode import resume
from rollmatch.environments.trajectory import Trajectory
from rollmatch.objectives.episodes import check_failed
from rollmatch.objectives.protocol import GenerationContext
from rollmatch.rollout.episodes import EpisodeRunner


class MultiTurn:
    """Continues from the middle of an episode, by the rule that sampled it; a ``Continuer``."""

    def __init__(self, world: EpisodeRunner, context: GenerationContext, *, logprobs: bool) -> None:
        self.world, self.context = world, context
        self.decoding = replace(context.decoding, logprobs=logprobs)
        self.rules = world.rules_of(self.decoding)
        self.max_new_tokens = world.max_response_tokens
        self._calls = count()

    def continue_states(self, requests: Sequence[ContinuationRequest]) -> list[Trajectory]:
        """As the protocol; all are played to their ends."""
        name = f"{self.context.step}.{self.context.ranks.rank}.c{next(self._calls)}"
        episodes = [
            resume(request.state, self.rules, seed=request.seed, request_id=f"{name}.{place}")
            for place, request in enumerate(requests)
        ]
        self.context.play(episodes, self.decoding)
        made = [episode.trajectory() for episode in episodes]
        check_failed(self.world, made, self.context)
        return made
