"""The scheduler finds every order, every deadlock, and nothing where nothing is wrong."""

from dataclasses import dataclass, field

import pytest

from conformance.tools.schedule import as_rank, do, explore, meet, when


@dataclass
class Toy:
    """Ranks given as lists of actions; ``broken`` is a note that must not be followed by ``bad``."""

    plans: list
    done: list = field(default_factory=list)

    def __post_init__(self):
        self.ranks = [self._walk(rank, plan) for rank, plan in enumerate(self.plans)]

    def _walk(self, rank, plan):
        for name in plan:
            yield meet(name) if name.startswith("meet") else do(name)
            self.done.append(f"{rank}{name}")

    def state(self):
        return tuple(self.done)

    def problem(self):
        return "b before a" if self.done[:1] == ["1b"] else ""


@pytest.mark.parametrize(("plans", "orders"), [([["a"]], 1), ([["a", "a"], ["c"]], 3), ([["x"], ["y"], ["z"]], 6)])
def test_every_order_is_counted(plans, orders):
    found = explore(lambda: Toy(plans))
    assert (found.num_orders, found.troubles) == (orders, ())


def test_a_deadlock_is_found_with_its_order():
    found = explore(lambda: Toy([["meet"], ["c"]]))
    assert {trouble.problem for trouble in found.troubles} == {"deadlock: rank 0 at meet"}
    assert explore(lambda: Toy([["meet"], ["c", "meet"]])).troubles == ()


def test_ranks_that_meet_at_different_places_are_found():
    (trouble, *_) = explore(lambda: Toy([["meet-x"], ["meet-y"]])).troubles
    assert trouble.problem == "ranks meet at different places: meet-x, meet-y"


def test_one_bad_order_among_many_is_found():
    found = explore(lambda: Toy([["a"], ["b"]]))
    assert [(trouble.problem, trouble.order) for trouble in found.troubles] == [("b before a", ("1:b",))]


def test_a_meeting_hands_round_what_everybody_brought():
    got = {}

    class AllGather:
        def __init__(self):
            self.ranks = [as_rank(lambda act, rank=rank: got.update({rank: act(meet("x", rank))})) for rank in (0, 1)]

        def state(self):
            return ()

        def problem(self):
            return ""

    assert explore(AllGather).troubles == ()
    assert got == {0: [0, 1], 1: [0, 1]}


@dataclass
class Latch:
    """One rank opens what the other waits for; without ``opens`` no rank does."""

    opens: bool = True
    is_open: bool = False

    def __post_init__(self):
        self.ranks = [self._open(), self._pass()]

    def _open(self):
        yield do("think")
        self.is_open = self.opens

    def _pass(self):
        yield when("wait", lambda: self.is_open)

    def state(self):
        return self.is_open

    def problem(self):
        return ""


def test_a_wait_ends_once_its_condition_holds_and_a_vain_one_is_a_deadlock():
    found = explore(Latch)
    assert (found.num_orders, found.troubles) == (1, ())
    (trouble,) = explore(lambda: Latch(opens=False)).troubles
    assert trouble.problem == "deadlock: rank 1 at wait"
