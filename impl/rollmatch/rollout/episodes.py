"""Episodes as rollouts: each goes at its own pace, or all of them in waves.

At its own pace an episode is a thread: it requests a turn, hands it to its environment, and requests the next one at
once. The engine's batch is filled by the episodes whose environments are not at work. In waves every live episode has a
turn before any has the next one; environments of one wave work at the same time. What is played is the same: seeds
follow from the run's seed, the sample, the attempt and the number of the turn.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Protocol

from rollmatch.environments.continuation import seed_from
from rollmatch.environments.environment import Environment, FailedEnvironment, MakeEnvironment, begin, generator_of
from rollmatch.environments.episode import Episode, EpisodeRules, Reply
from rollmatch.environments.limits import DEFAULTS, EnvironmentLimits, EpisodeFailed
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.retry import ServerRestarted

MAX_EPISODES = 1024
"""Episodes of a rank at the same time; the others begin in their order as these end."""
Generate = Callable[[Sequence[RolloutRequest], Decoding], list[Rollout]]


AsBegun = Callable[[RolloutRequest, Rollout], Rollout]
"""(request, its rollout) -> the rollout, by the version that the episode began with where the weights are the same."""


class Turns(Protocol):
    """Engines that write single turns, several at a time."""

    def write(self, place: int, request: RolloutRequest) -> Rollout:
        """The turn of the episode at this ``place`` of its window; from any thread."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """The environment of a run, and the rules of its episodes."""

    make: MakeEnvironment
    vocabulary: Vocabulary
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

    def begin(self, request: RolloutRequest, decoding: Decoding) -> Episode:
        """The episode whose first turn is requested so. Errors: those of ``begin``."""
        sample, attempt = request.sample, request.request_id
        chance = generator_of(self.run_seed, sample.sample_id, attempt)
        try:
            begun, _ = begin(self.make, sample, run_seed=self.run_seed, limits=self.limits)
            environment: Environment = begun.clone(chance)
        except EpisodeFailed as error:
            environment = FailedEnvironment(error)
        return Episode(
            request_id=attempt,
            sample=sample,
            prompt_token_ids=request.prompt_token_ids,
            environment=environment,
            rules=self.rules_of(decoding),
            seed=seed_from(self.run_seed, sample.sample_id, attempt),
            first_seed=request.seed,
        )


def begin_all(world: EpisodeRunner, requests: Sequence[RolloutRequest], decoding: Decoding) -> list[Episode]:
    """The episodes of these requests, in order; environments are reset at the same time."""
    with _pool(len(requests)) as pool:
        return list(pool.map(lambda request: world.begin(request, decoding), requests))


def play_in_waves(episodes: Sequence[Episode], decoding: Decoding, *, generate: Generate, ranks: Ranks) -> None:
    """Play all to their ends, a wave per turn; all ranks take part in as many waves. Errors: of ``Episode.take``."""
    with _pool(len(episodes)) as pool:
        while any(ranks.gather(any(episode.wants_turn for episode in episodes))):
            live = [episode for episode in episodes if episode.wants_turn]
            rollouts = generate([episode.request() for episode in live], decoding)
            taken = [pool.submit(one.take, rollout) for one, rollout in zip(live, rollouts, strict=True)]
            for each in taken:
                each.result()


def play_apart(episodes: Sequence[Episode], turns: Turns, *, as_begun: AsBegun) -> None:
    """Play each to its end at its own pace. Errors: those of the first episode that failed.

    After ``ServerRestarted`` no turn is under way, and episodes may be played on from where they are.
    """
    ends = Event()

    def play(place: int, episode: Episode) -> None:
        while episode.wants_turn and not ends.is_set():
            request = episode.request()
            try:
                rollout = turns.write(place, request)
            except ServerRestarted:
                ends.set()  # a sync comes next, which no call may be under way in
                raise
            episode.take(as_begun(request, rollout))

    with _pool(len(episodes)) as pool:
        left = {pool.submit(play, *pair) for pair in enumerate(episodes)}
        restarts: list[ServerRestarted] = []
        try:
            while left:
                ended, left = wait(left, return_when=FIRST_EXCEPTION)
                restarts += [error for error in map(_failure, ended) if isinstance(error, ServerRestarted)]
                for one in ended:
                    if not isinstance(one.exception(), ServerRestarted):
                        one.result()
        finally:
            ends.set()
    if restarts:
        raise restarts[0]


def _failure(one: Future[None]) -> BaseException | None:
    return one.exception()


@contextmanager
def _pool(num: int) -> Iterator[ThreadPoolExecutor]:
    """Threads for environments; after an error none is waited for."""
    pool = ThreadPoolExecutor(min(max(num, 1), MAX_EPISODES), thread_name_prefix="episode")
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
