"""Values of the states of trajectories: plain means over fresh continuations, and over siblings where configured.

What keeps the policy gradient right: a value never sees the trajectory it judges, so it does not depend on the
action taken from its state. What ``first_continuations`` below ``num_continuations`` costs: the number of samples then
depends on what they showed, so a mean is biased (towards the nearer end, by at most a few hundredths; zero at 0.5).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Protocol

from rollmatch.environments.continuation import Waves
from rollmatch.environments.trajectory import Cuts, State, Trajectory, states_of
from rollmatch.errors import TargetError

Owner = tuple[int, int]
"""(rank, index among its trajectories) of a trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRules:
    """How many continuations, and what stands in for them."""

    num_continuations: int
    """K of the paper."""
    siblings: Literal["none", "prompt", "all"] = "none"
    """Whether other responses through a state count as its continuations: nowhere, at the prompt, everywhere."""
    first_continuations: int | None = None
    """Request so many first, and the rest only where they differed; None requests all at once."""


class Valuer(Protocol):
    """Values of states; each trainer variant has one."""

    def values_of(self, trajectories: Sequence[Trajectory], cuts: Sequence[Cuts], waves: Waves) -> list["Valued"]:
        """The values before each step of each trajectory. Called by all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Valued:
    """The values of one trajectory."""

    values: tuple[float, ...]
    """[S] before each step."""
    counts: tuple[int, ...]
    """[S] returns that each is the mean of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A response went through a state, and what it was paid from there on."""

    owner: Owner
    state: State
    value: float


class ContinuationValues:
    """The paper's values. Errors: those of ``Waves.draw``."""

    def __init__(self, rules: ValueRules) -> None:
        self.rules = rules

    def values_of(self, trajectories: Sequence[Trajectory], cuts: Sequence[Cuts], waves: Waves) -> list[Valued]:
        """As the contract: unique states of all ranks, in one wave (two, where continuations come in two steps)."""
        rank, rules = waves.ranks.rank, self.rules
        mine = [passages_of((rank, i), t, c) for i, (t, c) in enumerate(zip(trajectories, cuts, strict=True))]
        through = group_by_state([p for part in waves.ranks.gather([p for row in mine for p in row]) for p in part])
        needed = {state: max(rules.num_continuations - self._num_free(through[state]), 0) for state in through}
        first = rules.first_continuations or rules.num_continuations
        waves.draw({state: min(num, first) for state, num in needed.items()})
        if first < rules.num_continuations:
            waves.draw({state: num for state, num in needed.items() if _differ(state, waves)})
        return [self._value(row, through, waves) for row in mine]

    def _num_free(self, passages: Sequence[Passage]) -> int:
        """Siblings that each response has here: one less than pass."""
        return len(passages) - 1 if self._counts_siblings(passages[0].state) else 0

    def _counts_siblings(self, state: State) -> bool:
        return self.rules.siblings == "all" or (self.rules.siblings == "prompt" and state.position == 0)

    def _value(self, row: Sequence[Passage], through: dict[State, list[Passage]], waves: Waves) -> Valued:
        samples = []
        for passage in row:
            fresh = [value for value in waves.drawn.get(passage.state, ()) if value is not None]
            free = [other.value for other in through[passage.state] if other.owner != passage.owner]
            samples.append(fresh + (free if self._counts_siblings(passage.state) else []))
        return make_valued(samples)


def passages_of(owner: Owner, trajectory: Trajectory, cuts: Cuts) -> list[Passage]:
    """[S] one per state of a trajectory."""
    states = states_of(trajectory, cuts)
    return [Passage(owner=owner, state=state, value=trajectory.return_from(state.position)) for state in states]


def group_by_state(passages: Sequence[Passage]) -> dict[State, list[Passage]]:
    """Who went through each state, in the order of ranks."""
    through: dict[State, list[Passage]] = {}
    for passage in passages:
        through.setdefault(passage.state, []).append(passage)
    return through


def make_valued(samples: Sequence[Sequence[float]]) -> Valued:
    """[S] lists of returns -> their plain means. Errors: ``value-unknown``.

    >>> make_valued([(0.0, 1.0), (1.0, 1.0)]).values
    (0.5, 1.0)
    """
    if not all(samples):
        raise TargetError(
            "every continuation of a state failed in its environment",
            code="value-unknown",
            key="custom.extra.environment.name",
            remedy="Correct the environment, raise vineppo.num_continuations, or lower failed_share to see the cause.",
        )
    return Valued(
        values=tuple(fmean(returns) for returns in samples),
        counts=tuple(len(returns) for returns in samples),
    )


def _differ(state: State, waves: Waves) -> bool:
    return len(set(waves.drawn.get(state, ())) - {None}) > 1
