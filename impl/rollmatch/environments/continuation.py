"""Continuations of states, requested by all ranks in waves."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

from rollmatch.environments.trajectory import State, Trajectory
from rollmatch.errors import TargetError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationRequest:
    """One continuation to be sampled."""

    state: State
    seed: int
    """Of the state and the number of the continuation, on every rank: never 0."""


class Continuer(Protocol):
    """Continues responses by the rule that sampled them: same decoding, stop tokens, token limit, reward."""

    max_new_tokens: int
    """Longest whole response."""

    def continue_states(self, requests: Sequence[ContinuationRequest]) -> list[Trajectory]:
        """One whole trajectory per request, in order, from its state's first id on. Called by all ranks, also empty."""


class RankGroup(Protocol):
    """The learner ranks, as ``ranks.Ranks``."""

    @property
    def rank(self) -> int:
        """Which one this is."""

    @property
    def learner_world_size(self) -> int:
        """How many there are."""

    def gather(self, item: Item) -> list[Item]:
        """One item per rank -> all of them, on every rank."""

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Summed over ranks."""


class Waves:
    """Continuations of an iteration: requested by any rank, sampled once, known to all.

    ``run_seed`` and ``step`` make the seeds; a state's are the same on every rank.
    """

    def __init__(self, continuer: Continuer, ranks: RankGroup, *, run_seed: int, step: int) -> None:
        self.continuer, self.ranks = continuer, ranks
        self.run_seed, self.step = run_seed, step
        self.drawn: dict[State, list[float | None]] = {}
        """Returns of a state's continuations, from the state on; None where the environment failed."""

    def draw(self, num_wanted: Mapping[State, int]) -> None:
        """Sample until every state has as many continuations as some rank wants; one wave, called by all ranks.

        Errors: ``continuation-outdated``, ``continuation-misaligned``, ``continuation-too-long``.
        """
        wanted: dict[State, int] = {}
        for part in self.ranks.gather(list(num_wanted.items())):
            for state, num in part:
                wanted[state] = max(num, wanted.get(state, 0))
        requests = [
            self.request(state, index)
            for state in sorted(wanted, key=lambda state: state.sort_key)
            for index in range(len(self.drawn.get(state, ())), wanted[state])
        ]
        mine = requests[self._share(len(requests))]
        made = self.continue_states(mine)
        returns = [
            None if one.failure else one.return_from(request.state.position)
            for request, one in zip(mine, made, strict=True)
        ]
        parts = self.ranks.gather(returns)
        for request, value in zip(requests, chain.from_iterable(parts), strict=True):
            self.drawn.setdefault(request.state, []).append(value)

    def continue_states(self, requests: Sequence[ContinuationRequest]) -> list[Trajectory]:
        """Continuations of this rank's own requests, checked."""
        made = self.continuer.continue_states(requests)
        if len(made) != len(requests):
            raise TargetError(
                f"{len(made)} for {len(requests)} requests", code="continuation-misaligned", key="continuations"
            )
        for request, trajectory in zip(requests, made):
            check_continuation(request.state, trajectory, max_new_tokens=self.continuer.max_new_tokens)
        return made

    def request(self, state: State, index: int) -> ContinuationRequest:
        """The ``index``-th continuation of a state."""
        return ContinuationRequest(
            state=state, seed=seed_of(state, index=index, run_seed=self.run_seed, step=self.step)
        )

    def _share(self, num: int) -> slice:
        """This rank's contiguous part, so that states that share a prefix stay together."""
        rank, world_size = self.ranks.rank, self.ranks.learner_world_size
        return slice(rank * num // world_size, (rank + 1) * num // world_size)


def check_continuation(state: State, made: Trajectory, *, max_new_tokens: int) -> None:
    """Raise the error of the rule that a continuation breaks."""
    key = state.sample.origin
    if made.policy_version != state.policy_version:
        raise TargetError(
            f"version {made.policy_version} continued a response of version {state.policy_version}",
            code="continuation-outdated",
            key=key,
            remedy="Nothing may sync between a response and its values.",
        )
    if made.token_ids[: state.position] != state.prefix_token_ids or len(made.token_ids) <= state.position:
        raise TargetError(
            "it does not begin with its state's ids, or adds none", code="continuation-misaligned", key=key
        )
    if len(made.token_ids) > max_new_tokens:
        raise TargetError(
            f"{len(made.token_ids)} ids, the limit is {max_new_tokens}", code="continuation-too-long", key=key
        )


def seed_of(state: State, *, index: int, run_seed: int, step: int) -> int:
    """One seed per state and continuation; the same for equal states, on any rank."""
    return seed_from(run_seed, step, index, state.sample_id, state.prefix_token_ids, state.fingerprint)


def seed_from(*values: object) -> int:
    """A seed in 1 .. 2**31 - 1 that depends on these values and nothing else.

    >>> seed_from(7, (1, 2)), seed_from(7, (12,))
    (1274729436, 2010641807)
    """
    word = int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=4).digest(), "little")
    return (word & 0x7FFFFFFF) or 1
