"""Episodes as rollouts: each goes at its own pace, or all of them in waves.

At its own pace an episode is a thread: it requests a turn, hands it to its environment, and requests the next one at
once. The engine's batch is filled by the episodes whose environments are not at work. In waves (``generate()``, and
ranks that share an engine) every live episode has a
turn before any has the next one; environments of one wave work at the same time. What is played is the same: seeds
follow from the run's seed, the sample, the attempt and the number of the turn.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Condition, Event
from typing import Literal, Protocol

from rollmatch.environments.continuation import seed_from
from rollmatch.environments.environment import Environment, FailedEnvironment, MakeEnvironment, begin, generator_of
from rollmatch.environments.episode import Episode, EpisodeRules, Reply
from rollmatch.environments.limits import DEFAULTS, EnvironmentLimits, EpisodeFailed
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.members import ServerLost
from rollmatch.rollout.prefetch_rules import ServerBackend
from rollmatch.rollout.retry import ServerRestarted

MAX_EPISODES = 1024
"""Episodes of a rank at the same time; the others begin in their order as these end."""
Generate = Callable[[Sequence[RolloutRequest], Decoding], list[Rollout]]


AsBegun = Callable[[RolloutRequest, Rollout], Rollout]
"""(request, its rollout) -> the rollout, by the version that the episode began with where the weights are the same."""
WriteTurn = Callable[[int, RolloutRequest], Rollout]
"""(place of the episode in its window, request) -> the turn; from any thread, several at a time."""


class TurnWriter(Protocol):
    """What writes single turns of several episodes at the same time."""

    def write(self, place: int, request: RolloutRequest) -> Rollout:
        """As ``WriteTurn``."""

    def drive(self, episodes: Collection[Future[None]]) -> None:
        """Do what only the main thread may, until all episodes are over or one has failed."""


class Interrupted(Exception):
    """A sync came between two turns of an episode, which is to be played again."""


ENDS_FOR_NOW = (ServerRestarted, ServerLost, Interrupted)


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
    may_move: bool = False
    """Whether the rest of an episode may be written by newer weights than what stands before it."""

    def rules_of(self, decoding: Decoding) -> EpisodeRules:
        """Of episodes whose turns are decoded so."""
        return EpisodeRules(
            vocabulary=self.vocabulary,
            reply=self.reply,
            max_turns=self.max_turns,
            max_turn_tokens=decoding.max_new_tokens,
            max_response_tokens=self.max_response_tokens,
            limits=self.limits,
            may_move=self.may_move,
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


def play_apart(
    episodes: Sequence[Episode],
    write: WriteTurn,
    *,
    as_begun: AsBegun | None = None,
    drive: Callable[[Collection[Future[None]]], None] | None = None,
) -> None:
    """Play each to its end at its own pace. ``drive``: as ``TurnWriter``. Errors: its, and those of ``write`` and
    ``Episode.take``.

    After ``ServerRestarted``, ``ServerLost`` and ``Interrupted`` nothing is under way, and episodes may be played on
    from where they are.
    """
    ends = Event()

    def play(place: int, episode: Episode) -> None:
        while episode.wants_turn and not ends.is_set():
            request = episode.request()
            try:
                rollout = write(place, request)
            except ENDS_FOR_NOW:
                ends.set()  # a sync comes next, which no call may be under way in
                raise
            episode.take(rollout if as_begun is None else as_begun(request, rollout))

    lost: list[BaseException] = []
    with _pool(len(episodes)) as pool:
        left = {pool.submit(play, *pair) for pair in enumerate(episodes)}
        try:
            if drive is not None:
                drive(left)
            while left:
                ended, left = wait(left, return_when=FIRST_EXCEPTION)
                for error in filter(None, map(Future.exception, ended)):
                    if not isinstance(error, ENDS_FOR_NOW):
                        raise error
                    lost.append(error)
        finally:
            ends.set()
    if lost:
        raise lost[0]


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


InFlight = Literal["wait", "keep", "restart"]


class EpisodeServers:
    """Servers that return whole episodes; satisfies ``ServerBackend``.

    ``in_flight`` says what a sync does with episodes under way: it waits for them, it comes in their midst (also of a
    turn), or it waits for turns and they are played again with the new weights. After the restart of a server no turn
    begins until a sync has ended.
    """

    def __init__(self, servers: ServerBackend, world: EpisodeRunner, *, in_flight: InFlight = "wait") -> None:
        self.servers, self.world, self.in_flight = servers, world, in_flight
        self._gate = Condition()
        self._restarted: ServerRestarted | None = None
        self._is_closed, self._num_turns, self._num_syncs = False, 0, 0

    @property
    def num_servers(self) -> int:
        """At least 1."""
        return self.servers.num_servers

    @property
    def lost(self) -> Collection[int]:
        """Servers that take no calls."""
        return self.servers.lost

    def generate_on(
        self, server_index: int, requests: Sequence[RolloutRequest], decoding: Decoding, *, start: int
    ) -> list[Rollout]:
        """The episodes that begin with these requests, in order. Errors: those of ``play_apart``."""

        played: dict[int, Rollout] = {}
        while left := [place for place in range(len(requests)) if place not in played]:
            num_syncs = self._num_syncs

            def write(
                index: int, request: RolloutRequest, left: Sequence[int] = left, num_syncs: int = num_syncs
            ) -> Rollout:
                with self._turn(num_syncs):
                    place = start + left[index]
                    return self.servers.generate_on(server_index, [request], decoding, start=place)[0]

            episodes = begin_all(self.world, [requests[place] for place in left], decoding)
            with suppress(Interrupted):
                play_apart(episodes, write)
            pairs = zip(left, episodes, strict=True)
            played |= {place: episode.rollout() for place, episode in pairs if not episode.wants_turn}
        return [played[place] for place in range(len(requests))]

    @contextmanager
    def held(self) -> Iterator[None]:
        """No turn begins inside, and none is under way but with ``keep``."""
        with self._gate:
            self._is_closed, self._num_syncs = True, self._num_syncs + 1
            self._gate.notify_all()
            if self.in_flight != "keep":
                self._gate.wait_for(lambda: not self._num_turns)
        yield
        with self._gate:
            self._is_closed, self._restarted = False, None
            self._gate.notify_all()

    @contextmanager
    def _turn(self, num_syncs: int) -> Iterator[None]:
        """``num_syncs``: when the episode began."""
        with self._gate:
            self._gate.wait_for(lambda: not self._is_closed or self._interrupts(num_syncs))
            if self._interrupts(num_syncs):
                raise Interrupted
            if self._restarted is not None:
                raise self._restarted
            self._num_turns += 1
        try:
            yield
        except ServerRestarted as error:
            self._restarted = error
            raise
        finally:
            with self._gate:
                self._num_turns -= 1
                self._gate.notify_all()

    def _interrupts(self, num_syncs: int) -> bool:
        return self.in_flight == "restart" and num_syncs != self._num_syncs
