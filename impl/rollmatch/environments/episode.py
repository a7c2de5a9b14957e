"""A response of several turns that is under way: what the policy wrote, what the environment answered, who wrote which.

Ids are as sampled: a turn's text is read from them, never tokenised again. A turn ends with a stop token or at its
limit; the ids of the observation follow it, and belong to no turn.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollmatch.environments.continuation import seed_from
from rollmatch.environments.environment import (
    ActionUnparsable,
    Environment,
    generator_of,
    take_snapshot,
    take_step,
)
from rollmatch.environments.limits import DEFAULTS, EnvironmentLimits, EpisodeFailed
from rollmatch.environments.trajectory import EpisodeRollout, State, Trajectory, Turn, TurnTimes
from rollmatch.errors import TargetError
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.records import Rollout, RolloutRequest, Sample, joined_runs

Reply = Callable[[str, bool], tuple[int, ...]]
"""(observation, whether the turn before it ended with a stop token) -> ids that stand before the next turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """How long episodes are, and how they are spelled."""

    vocabulary: Vocabulary
    reply: Reply
    max_turns: int
    max_turn_tokens: int
    max_response_tokens: int
    """Of all turns and observations."""
    may_move: bool = False
    """Whether the rest may be written by newer weights than what stands before it."""
    limits: EnvironmentLimits = DEFAULTS


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """One of them; ``take`` the rollout of each ``request`` while it ``wants_turn``."""

    request_id: str
    sample: Sample
    prompt_token_ids: tuple[int, ...]
    """[P'] as sent."""
    policy_version: int | None = None
    """The oldest of all turns; None before the first one."""
    policy_versions: list[tuple[int, int]] = field(default_factory=list)
    """Runs of (version, number of tokens that it wrote), in order; observations are in none."""
    environment: Environment
    rules: EpisodeRules
    seed: int | str
    """Of this attempt: the environment's chance and every turn's sampling go by it."""
    first_seed: int | None = None
    """Of the first turn; None: it follows from ``seed``, as those of later turns."""
    seen_prompt: tuple[int, ...] = ()
    """[P] as the engine saw it, known after the first turn."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    """None once an engine has returned none."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    turn: Turn = field(init=False)
    """Under way; its stop is not known yet."""
    is_over: bool = False
    is_finished: bool = field(init=False)
    """Known after a turn: the environment ended it, or it wrote what is no action; else a limit did."""
    unparsable: str = ""
    """What was wrong with the last action, if it was none."""
    failure: str = ""
    """What the environment failed with; the episode teaches nothing."""
    requested: float = 0.0
    """When the turn under way was; as ``TurnTimes``."""
    times: list[TurnTimes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begin_turn(0)

    @property
    def remaining_tokens(self) -> int:
        """Tokens that the turn may still have."""
        written = len(self.token_ids) - self.turn.start
        return min(self.rules.max_turn_tokens - written, self.rules.max_response_tokens - len(self.token_ids))

    @property
    def wants_turn(self) -> bool:
        """Whether another turn is to be taken; one whose environment failed at its beginning has a first one, too."""
        return not self.is_over or self.policy_version is None

    def request(self) -> RolloutRequest:
        """For the rest of the turn under way."""
        number, self.requested = self.turn.number, time.monotonic()
        first_seed = self.first_seed if number == 0 else None
        return RolloutRequest(
            request_id=self.request_id if number == 0 else f"{self.request_id}.{number}",
            sample=self.sample,
            prompt_token_ids=self.prompt_token_ids,
            prefix_token_ids=tuple(self.token_ids),
            max_new_tokens=self.remaining_tokens,
            seed=seed_from(self.seed, number) if first_seed is None else first_seed,
            policy_version=self.policy_version,
        )

    def take(self, rollout: Rollout) -> None:
        """The rest of the turn under way, and the environment's answer to it.

        Errors: ``continuation-outdated``, and those of ``take_step``.
        """
        written = time.monotonic()
        tools = self._take(rollout)
        self.times.append(TurnTimes(requested=self.requested, written=written, replied=time.monotonic(), tools=tools))

    def _take(self, rollout: Rollout) -> tuple[tuple[str, float], ...]:
        """The tools that the turn called."""
        if self.policy_version is None:
            self.policy_version, self.seen_prompt = rollout.policy_version, rollout.prompt_token_ids
        if rollout.policy_version != self.policy_version and not self.rules.may_move:
            raise TargetError(
                f"version {rollout.policy_version} wrote a turn where version {self.policy_version} had begun",
                code="continuation-outdated",
                key=self.sample.origin,
                remedy="Nothing may sync while an episode is played.",
            )
        is_stopped = self._write(rollout)
        start, stop = self.turn.start, len(self.token_ids)
        self.turns.append(Turn(start=start, stop=stop, snapshot=self.turn.snapshot, number=self.turn.number))
        if self.failure:  # in its beginning
            return ()
        action = self.rules.vocabulary.text(self.token_ids[start : stop - is_stopped])
        try:
            answer = take_step(self.environment, action, key=self.sample.origin, limits=self.rules.limits)
        except ActionUnparsable as error:
            self.is_over, self.is_finished, self.unparsable = True, True, error.problem
            return ()
        except EpisodeFailed as error:
            self._fail(error)
            return ()
        self.rewards.append((stop, answer.reward))
        self.is_finished = answer.terminated
        self.is_over = answer.terminated or answer.truncated or self.turn.number + 1 >= self.rules.max_turns
        if not self.is_over:
            self._hear(self.rules.reply(answer.observation, is_stopped))
        return answer.tool_seconds

    def rollout(self) -> EpisodeRollout:
        """The whole episode, once it is over."""
        trajectory, stop_ids = self.trajectory(), self.rules.vocabulary.stop_ids
        ids = trajectory.token_ids
        stop_id = ids[-1] if ids[-1] in stop_ids else None
        return EpisodeRollout(
            request_id=self.request_id,
            prompt_token_ids=self.seen_prompt,
            response_token_ids=ids if stop_id is None else ids[:-1],
            stop_id=stop_id,
            policy_version=trajectory.policy_version,
            response_logprobs=trajectory.logprobs,
            trajectory=trajectory,
            num_written=sum(turn.stop - turn.start - (ids[turn.stop - 1] in stop_ids) for turn in trajectory.turns),
            unparsable=self.unparsable,
            version_runs=tuple(self.policy_versions),
            times=tuple(self.times),
        )

    def trajectory(self) -> Trajectory:
        """What has become of it."""
        assert self.policy_version is not None, "a turn was taken"
        return Trajectory(
            sample=self.sample,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            rewards=tuple(self.rewards),
            policy_version=self.policy_version,
            turns=tuple(self.turns),
            is_finished=self.is_finished,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            failure=self.failure,
            environment=self.environment,
        )

    def _fail(self, error: EpisodeFailed) -> None:
        self.is_over, self.is_finished, self.failure = True, False, str(error)

    def _write(self, rollout: Rollout) -> bool:
        """Append what was sampled; whether a stop token ended it."""
        self.token_ids += rollout.sampled_ids
        self.policy_versions = joined_runs((*self.policy_versions, *rollout.policy_versions))
        given = rollout.response_logprobs
        if self.logprobs is not None:
            self.logprobs = None if given is None else self.logprobs + list(given)
        return rollout.stop_id is not None

    def _hear(self, ids: tuple[int, ...]) -> None:
        """Append an observation, or end where no turn would fit behind it."""
        if len(self.token_ids) + len(ids) >= self.rules.max_response_tokens:
            self.is_over = True
            return
        self.token_ids += ids
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(ids)
        self._begin_turn(self.turn.number + 1)

    def _begin_turn(self, number: int) -> None:
        start, snapshot = len(self.token_ids), None
        try:
            snapshot = take_snapshot(self.environment, key=self.sample.origin)
        except EpisodeFailed as error:
            self._fail(error)
        self.turn = Turn(start=start, stop=start, snapshot=snapshot, number=number)


def resume(state: State, rules: EpisodeRules, *, seed: int, request_id: str) -> Episode:
    """An episode that continues from a state: a clone of the environment before the turn that the prefix ends in."""
    turn = state.turn
    assert turn is not None, "states of episodes know their turn"
    episode = Episode(
        request_id=request_id,
        sample=state.sample,
        prompt_token_ids=state.prompt_token_ids,
        policy_version=state.policy_version,
        environment=turn.snapshot.clone(generator_of(seed)),
        rules=rules,
        seed=seed,
        token_ids=list(state.prefix_token_ids),
        logprobs=[0.0] * state.position,
    )
    episode.turn = turn
    return episode
