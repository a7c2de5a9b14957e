"""Every order in which a few ranks can run, tried one after the other, deterministically.

A rank is a generator that yields what it does next. ``do`` actions happen when the rank is resumed; a collective
(``meet``) happens once every rank has arrived at it; a wait (``when``) happens once its condition holds. Between two
yields no other rank runs. States that were seen before are not explored twice, so that a system with thousands of
orders is explored over some hundred states; the number of orders is counted all the same. A world's ``state`` has to
hold everything that its future depends on, beside the places of its ranks.

Ordinary blocking code becomes a rank by ``as_rank``: it runs in a thread that is only ever given one action at a time.
"""

from _thread import start_new_thread
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

MAX_STATES = 100_000


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does next."""

    name: str
    meets: bool = False
    """Whether all ranks do it together."""
    item: Any = None
    """What the rank brings to the others."""
    condition: Callable[[], bool] = lambda: True
    """The rank waits until this holds."""


def do(name: str) -> Action:
    """An action of one rank alone."""
    return Action(name)


def when(name: str, condition: Callable[[], bool]) -> Action:
    """A wait: enabled while ``condition`` holds."""
    return Action(name, condition=condition)


def meet(name: str, item: Any = None) -> Action:
    """A barrier, or an exchange: every rank gets the list of all items."""
    return Action(name, meets=True, item=item)


Rank = Generator[Action, Any, None]


class World(Protocol):
    """Ranks and what they share; a new one for every order."""

    ranks: Sequence[Rank]

    def state(self) -> Hashable:
        """What is shared."""

    def problem(self) -> str:
        """What is wrong, empty while all is well; checked after every action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """An order that ends badly."""

    problem: str
    order: tuple[str, ...]
    """``rank:action``, as they happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """Made by ``explore``."""

    troubles: tuple[Trouble, ...]
    num_orders: int
    num_states: int


class _OrderWalk:
    """One order, from its first choices on."""

    def __init__(self, world: World, choices: Sequence[int]) -> None:
        self.world = world
        self.pending: list[Action | None] = [None] * len(world.ranks)
        self.arrived = [False] * len(world.ranks)
        self.taken = [0] * len(world.ranks)
        self.order: list[str] = []
        self.problem = ""
        for rank in range(len(world.ranks)):
            self._resume(rank, None)
        for rank in choices:
            self.step(rank)

    def enabled(self) -> list[int]:
        """Ranks that can run."""
        return [r for r, action in enumerate(self.pending) if action and not self.arrived[r] and action.condition()]

    def step(self, rank: int) -> None:
        action = self.pending[rank]
        assert action is not None
        self.order.append(f"{rank}:{action.name}")
        self.taken[rank] += 1
        if action.meets:
            self.arrived[rank] = True
            self._meet()
        else:
            self._resume(rank, None)
        self.problem = self.problem or self.world.problem()

    def state(self) -> Hashable:
        return tuple(self.taken), tuple(self.arrived), self.world.state()

    def close(self) -> None:
        for rank in self.world.ranks:
            rank.close()

    def stuck(self) -> str:
        """Why no rank can run; empty when all are done."""
        waiting = [f"rank {r} at {action.name}" for r, action in enumerate(self.pending) if action is not None]
        return f"deadlock: {', '.join(waiting)}" if waiting else ""

    def _meet(self) -> None:
        if not all(self.arrived):
            return
        actions = [action for action in self.pending if action is not None]
        if len({action.name for action in actions}) > 1:
            self.problem = f"ranks meet at different places: {', '.join(action.name for action in actions)}"
            return
        items = [action.item for action in actions]
        self.arrived = [False] * len(self.arrived)
        for rank in range(len(items)):
            self._resume(rank, list(items))

    def _resume(self, rank: int, answer: Any) -> None:
        try:
            self.pending[rank] = self.world.ranks[rank].send(answer)
        except StopIteration:
            self.pending[rank] = None


def explore(make_world: Callable[[], World], *, until: Callable[[str], bool] = lambda problem: False) -> Exploration:
    """Try every order. Ends an order at its first problem; ends the exploration at a problem that ``until`` accepts."""
    troubles: list[Trouble] = []
    orders: dict[Hashable, int] = {}

    def count(walk: _OrderWalk, choices: tuple[int, ...]) -> int:
        state, problem, enabled = walk.state(), walk.problem, walk.enabled()
        problem = problem or ("" if enabled else walk.stuck())
        if state not in orders:
            assert len(orders) < MAX_STATES, "too many states: explore fewer ranks or steps"
            if problem:
                troubles.append(Trouble(problem=problem, order=tuple(walk.order)))
                enabled = []
            orders[state] = 0 if enabled else 1
            for rank in enabled:
                if troubles and until(troubles[-1].problem):
                    break
                further = (*choices, rank)
                if rank == enabled[0]:
                    walk.step(rank)  # the others walk here from the start once more
                orders[state] += count(walk if rank == enabled[0] else _OrderWalk(make_world(), further), further)
        walk.close()
        return orders[state]

    total = count(_OrderWalk(make_world(), ()), ())
    return Exploration(troubles=tuple(troubles), num_orders=total, num_states=len(orders))


class Abandoned(BaseException):
    """The order that a thread runs in is not walked any further."""


def as_rank(work: Callable[[Callable[[Action], Any]], None]) -> Rank:
    """Blocking code as a rank: ``work`` is given a function that does one action and returns its answer.

    It runs in a thread; of this and the one who explores, only one runs at a time.
    """
    turns, actions = SimpleQueue[Any](), SimpleQueue[Action | BaseException | None]()

    def act(action: Action) -> Any:
        actions.put(action)
        if (answer := turns.get()) is Abandoned:
            raise Abandoned
        return answer

    def run() -> None:
        try:
            work(act)
            actions.put(None)
        except BaseException as error:  # noqa: BLE001 - handed on to the one who explores
            actions.put(error)

    start_new_thread(run, ())
    try:
        while isinstance(action := actions.get(), Action):
            turns.put((yield action))
    except GeneratorExit:
        turns.put(Abandoned)
        raise
    if action is not None:
        raise action
