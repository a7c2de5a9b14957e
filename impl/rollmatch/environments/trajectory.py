"""A response as reinforcement learning sees it: sampled ids, what each was paid, and where another can continue."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rollmatch.errors import TargetError
from rollmatch.records import Rollout, Sample

Cuts = tuple[int, ...]
"""[S + 1] ascending step bounds of a trajectory, from 0 to its length; step i is ``token_ids[cuts[i]:cuts[i + 1]]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A part of a trajectory that the policy wrote; what lies between turns was written by an environment."""

    start: int
    stop: int
    snapshot: Any = field(default=None, compare=False)
    """The environment before this turn, None where there is none."""
    number: int
    """Turns before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTimes:
    """When a turn was requested, written and replied to. Unit: seconds of this machine's monotonic clock."""

    requested: float
    written: float
    replied: float
    tools: tuple[tuple[str, float], ...] = ()
    """(name, seconds) of the tools that it called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One response from its first token to its end. Made by ``continuation``, used by splitters, values, segments."""

    sample: Sample
    prompt_token_ids: tuple[int, ...]
    """[P'] as sent."""
    token_ids: tuple[int, ...]
    """[R] as sampled, with the stop token where there was one; observations of an environment included."""
    rewards: tuple[tuple[int, float], ...]
    """(number of ids before it was paid, reward), ascending."""
    policy_version: int
    turns: tuple[Turn, ...] = ()
    """Ascending; empty: the policy wrote everything."""
    is_finished: bool
    """Whether it ended by itself, not at its token limit."""
    logprobs: tuple[float, ...] | None = None
    """[R] of the sampled ids, 0.0 for ids of an environment."""
    failure: str = ""
    """What its environment failed with; it teaches nothing, and is worth nothing known."""
    environment: Any = field(default=None, compare=False)
    """As the episode left it; None where there is none."""

    @property
    def total_return(self) -> float:
        """Sum of all rewards (nothing is discounted)."""
        return sum(reward for _, reward in self.rewards)

    def return_from(self, position: int) -> float:
        """What is paid after the first ``position`` ids."""
        return sum(reward for place, reward in self.rewards if place > position)

    @property
    def last_turn_ids(self) -> tuple[int, ...]:
        """What the policy wrote last, its stop token included."""
        return self.token_ids[self.turns[-1].start : self.turns[-1].stop] if self.turns else self.token_ids

    def step_rewards(self, cuts: Cuts) -> tuple[float, ...]:
        """[S] what each step was paid.

        >>> from rollmatch.records import Sample
        >>> sample = Sample(sample_id=0, origin="x:1", images=(), objects=(), width=8, height=8)
        >>> Trajectory(sample=sample, prompt_token_ids=(1,), token_ids=(5, 6, 7), rewards=((1, 0.5), (3, 2.0)),
        ...            policy_version=1, is_finished=True).step_rewards((0, 1, 2, 3))
        (0.5, 0, 2.0)
        """
        return tuple(sum(r for place, r in self.rewards if start < place <= stop) for start, stop in pairwise(cuts))

    def is_written(self, position: int) -> bool:
        """Whether the policy wrote the id at this position."""
        return not self.turns or any(turn.start <= position < turn.stop for turn in self.turns)

    @property
    def written(self) -> tuple[bool, ...]:
        """[R] whether the policy wrote each id.

        >>> from rollmatch.records import Sample
        >>> whole = Trajectory(sample=Sample(sample_id=0, origin="x:1", images=()), prompt_token_ids=(1,), rewards=(),
        ...                    token_ids=(5, 6, 7, 8, 9), policy_version=1, is_finished=True,
        ...                    turns=(Turn(start=0, stop=2, number=0), Turn(start=4, stop=5, number=1)))
        >>> whole.written
        (True, True, False, False, True)
        """
        mask = [not self.turns] * len(self.token_ids)
        for turn in self.turns:
            mask[turn.start : turn.stop] = [True] * (turn.stop - turn.start)
        return tuple(mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRollout(Rollout):
    """A whole episode as one rollout: its response holds all turns, and the observations between them."""

    trajectory: Trajectory
    num_written: int
    """Tokens of all turns, without stop tokens."""
    unparsable: str = ""
    """What was wrong with the last action, if it was none."""
    times: tuple[TurnTimes, ...] = field(default=(), compare=False)
    """Of each turn."""

    @property
    def policy_versions(self) -> tuple[tuple[int, int], ...]:
        """As of the contract; observations are in none of the runs."""
        return self.version_runs

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return self.num_written


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where continuations start: a prompt and the first ids of a response, as sampled."""

    sample: Sample = field(compare=False)
    prompt_token_ids: tuple[int, ...] = field(compare=False)
    prefix_token_ids: tuple[int, ...]
    """Of the response; empty: the prompt itself."""
    policy_version: int
    turn: Turn | None = field(default=None, compare=False)
    """The turn that the prefix ends in, None where there is no environment."""
    sample_id: int
    fingerprint: Hashable = None
    """Of the environment."""

    @property
    def position(self) -> int:
        """Ids of the response so far."""
        return len(self.prefix_token_ids)

    @property
    def sort_key(self) -> tuple[int, tuple[int, ...], str]:
        """Puts a state right before those that begin with it, so that a prefix cache serves one after the other."""
        return self.sample_id, self.prefix_token_ids, str(self.fingerprint)

    def budget_left(self, max_new_tokens: int) -> int:
        """How long a continuation may be where a whole response may be ``max_new_tokens`` long."""
        return max_new_tokens - self.position


def state_at(trajectory: Trajectory, position: int) -> State:
    """The state after ``position`` ids.

    >>> from rollmatch.records import Sample
    >>> sample = Sample(sample_id=4, origin="x:5", images=(), objects=(), width=8, height=8)
    >>> whole = Trajectory(sample=sample, prompt_token_ids=(1,), token_ids=(5, 6, 7), rewards=(), policy_version=1,
    ...                    is_finished=True)
    >>> state_at(whole, 2).prefix_token_ids, state_at(whole, 2).budget_left(100)
    ((5, 6), 98)
    """
    turn = next((turn for turn in reversed(trajectory.turns) if turn.start <= position), None)
    snapshot = turn.snapshot if turn else None
    return State(
        sample=trajectory.sample,
        sample_id=trajectory.sample.sample_id,
        prompt_token_ids=trajectory.prompt_token_ids,
        prefix_token_ids=trajectory.token_ids[:position],
        policy_version=trajectory.policy_version,
        turn=turn,
        fingerprint=snapshot.fingerprint() if snapshot is not None else None,
    )


def states_of(trajectory: Trajectory, cuts: Cuts) -> tuple[State, ...]:
    """[S] the state before each step; the end of a response is none, its value is 0. Errors: ``steps-do-not-tile``."""
    check_cuts(trajectory, cuts)
    return tuple(state_at(trajectory, start) for start in cuts[:-1])


def check_cuts(trajectory: Trajectory, cuts: Cuts) -> None:
    """Raise ``steps-do-not-tile`` unless the cuts go from 0 to the end in ascending order."""
    whole = len(trajectory.token_ids)
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != whole or any(a >= b for a, b in pairwise(cuts)):
        raise TargetError(
            f"cuts {cuts[:6]}... do not tile {whole} ids",
            code="steps-do-not-tile",
            key=trajectory.sample.origin,
            remedy="A splitter gives 0, the start of each further step, and the length.",
        )
