"""A search tree over the steps of responses to one prompt.

Two kinds of numbers live in a node, and only one of them is a value. ``visits`` and ``total`` are the search's: every
return is backed up to the root, although the search itself chose where to continue, so they only say where to look.
``returns`` are the value's: of responses and continuations that the policy alone wrote through the node's state,
started at it or above it; their mean is the state's value under the policy, whichever steps led to it.

What holds: a value never counts the trajectory it judges; nothing that the search selected stands in a value above the
place where it was started; values of an older policy version are gone with their tree. What does not: the search
decides by outcomes how many returns a node gets, so a value is consistent, but at a finite number not exactly unbiased.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import Literal

from rollmatch.environments.trajectory import Cuts, State, Trajectory, check_cuts, state_at
from rollmatch.errors import TargetError
from rollmatch.objectives.vineppo.value import Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRules:
    """Where the search continues."""

    select: Literal["uct", "puct"] = "uct"
    exploration: float = 1.0
    """Weight of what was seldom visited."""
    widening: float = 1.0
    """A node may have ``widening * visits ** 0.5`` children before the search goes below them."""


@dataclass(slots=True, eq=False)
class Node:
    """A state, reached from its parent by one step."""

    state: State | None
    """None: the end of a response, whose value is 0."""
    parent: "Node | None"
    step_reward: float = 0.0
    """Of the step that leads here."""
    step_logprob: float = 0.0
    visits: int = 0
    total: float = 0.0
    """Of the returns from here on, over all visits."""
    pending: int = 0
    """Continuations that are under way below."""
    returns: list[tuple[Owner | None, float]] = field(default_factory=list)
    """(trajectory or None for a continuation, return from here on); of all nodes of one state the same list."""
    children: dict[Hashable, "Node"] = field(default_factory=dict)
    """By step and by the state it leads to."""

    def returns_without(self, owner: Owner) -> list[float]:
        """What the value of this node is the mean of, for a trajectory."""
        return [value for own, value in self.returns if own != owner]

    def lineage(self) -> Iterator["Node"]:
        """This node, its parent, and so on to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class Tree:
    """All that is known below one prompt, by one policy version."""

    def __init__(self, root: State, rules: SearchRules) -> None:
        self.rules = rules
        self.root = Node(state=root, parent=None)
        self.policy_version = root.policy_version
        self._returns = {root: self.root.returns}
        """By state: other steps, as those of a longer response, may lead to the same one."""

    def add(
        self, trajectory: Trajectory, cuts: Cuts, *, start: Node | None = None, owner: Owner | None = None
    ) -> list[Node]:
        """Insert a response (from the root), or a continuation from ``start``; then back its returns up.

        Cuts before ``start`` count for nothing.
        Its path: the nodes of the states it went through, its end left out.

        Errors: ``tree-outdated``, ``steps-do-not-tile``.
        """
        if trajectory.policy_version != self.policy_version:
            problem = f"it holds version {self.policy_version}, the trajectory is of {trajectory.policy_version}"
            raise TargetError(problem, code="tree-outdated", key=trajectory.sample.origin)
        check_cuts(trajectory, cuts)
        node = start or self.root
        assert node.state is not None
        begun = node.state.position
        passed = [node]
        for stop in (cut for cut in cuts if cut > begun):
            node = self._child(node, trajectory, stop)
            passed.append(node)
        for node in passed[:-1]:
            assert node.state is not None
            node.returns.append((owner, trajectory.return_from(node.state.position)))
        for node, value in _worths(passed, trajectory):
            node.visits += 1
            node.total += value
        return passed[:-1]

    def select(self) -> Node:
        """Where to continue next: down to the first node that is not wide enough, or whose children all are ends."""
        node = self.root
        while True:
            inner = [child for child in node.children.values() if child.state is not None]
            if not inner or self._may_widen(node):
                return node
            node = max(inner, key=lambda child: self._score(child, inner))

    def _may_widen(self, node: Node) -> bool:
        return len(node.children) + node.pending < self.rules.widening * sqrt(node.visits + node.pending)

    def _score(self, child: Node, siblings: list[Node]) -> float:
        assert child.parent is not None
        above = child.parent.visits + child.parent.pending
        visits = child.visits + child.pending
        mean = child.step_reward + child.total / visits
        if self.rules.select == "uct":
            return mean + self.rules.exploration * sqrt(log(above) / visits)
        prior = exp(child.step_logprob) / sum(exp(sibling.step_logprob) for sibling in siblings)
        return mean + self.rules.exploration * prior * sqrt(above) / (1 + visits)

    def _child(self, node: Node, trajectory: Trajectory, stop: int) -> Node:
        assert node.state is not None
        begun, is_end = node.state.position, stop == len(trajectory.token_ids)
        state = None if is_end else state_at(trajectory, stop)
        step = trajectory.token_ids[begun:stop], state.fingerprint if state else "end"
        if step in node.children:
            return node.children[step]
        child = Node(
            state=state,
            parent=node,
            step_reward=sum(trajectory.step_rewards((begun, stop))),
            step_logprob=sum(trajectory.logprobs[begun:stop]) if trajectory.logprobs else 0.0,
            returns=[] if state is None else self._returns.setdefault(state, []),
        )
        node.children[step] = child
        return child


def _worths(passed: list[Node], trajectory: Trajectory) -> Iterator[tuple[Node, float]]:
    """All nodes from the root to the end, and the return from each on.

    What lies above the start was paid by the steps that led there.
    """
    for node in passed:
        yield node, 0.0 if node.state is None else trajectory.return_from(node.state.position)
    below, *above = passed[0].lineage()
    assert below.state is not None
    value = trajectory.return_from(below.state.position)
    for node in above:
        value, below = value + below.step_reward, node
        yield node, value
