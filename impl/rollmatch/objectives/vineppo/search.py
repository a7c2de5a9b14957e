"""VinePPO-MCTS: a tree per prompt decides where continuations are worth most, and every value is read from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollmatch.environments.continuation import Waves
from rollmatch.environments.trajectory import Cuts, State, Trajectory, state_at
from rollmatch.objectives.vineppo.split import Splitter
from rollmatch.objectives.vineppo.tree import Node, SearchRules, Tree
from rollmatch.objectives.vineppo.value import Owner, Valued, make_valued


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """What the search may spend per prompt."""

    num_rounds: int
    """Waves of continuations."""
    num_per_round: int
    """Continuations of a tree in each wave."""
    num_least: int
    """Returns, its own left out, that each value is the mean of at least; missing ones are sampled afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """A trajectory that is to be judged, with what names it on all ranks."""

    owner: Owner
    trajectory: Trajectory
    cuts: Cuts


class TreeValues:
    """Values from search trees; the trajectories that are learnt from are those the policy sampled from the prompt.

    A sample's tree is grown by one rank, from the responses of all of one window: no value of older weights is read,
    and a window may be judged again. Errors: those of ``Tree`` and ``Waves``.
    """

    def __init__(self, rules: SearchRules, budget: SearchBudget, splitter: Splitter) -> None:
        self.rules, self.budget, self.splitter = rules, budget, splitter
        self.trees: dict[int, Tree] = {}
        """Those of this rank, of the window that was judged last, by sample."""

    def values_of(self, trajectories: Sequence[Trajectory], cuts: Sequence[Cuts], waves: Waves) -> list[Valued]:
        """As the contract."""
        ranks = waves.ranks
        mine = [
            _Walk(owner=(ranks.rank, i), trajectory=t, cuts=c)
            for i, (t, c) in enumerate(zip(trajectories, cuts, strict=True))
        ]
        walks = [walk for part in ranks.gather(mine) for walk in part]
        trees, paths = self._plant(walks, ranks.rank, ranks.learner_world_size)
        self.trees = trees
        for _ in range(self.budget.num_rounds):
            self._grow(list(trees.values()), waves)
        self._top_up(paths, trees, waves)
        known = {own: make_valued([node.returns_without(own) for node in path]) for own, path in paths.items()}
        values = {owner: valued for part in ranks.gather(known) for owner, valued in part.items()}
        return [values[walk.owner] for walk in mine]

    def _plant(
        self, walks: Sequence[_Walk], rank: int, world_size: int
    ) -> tuple[dict[int, Tree], dict[Owner, list[Node]]]:
        """This rank's trees, by sample, with the responses in them, and the path of each response."""
        places = {walk.trajectory.sample.sample_id: 0 for walk in walks}
        mine = {sample_id for place, sample_id in enumerate(places) if place % world_size == rank}
        trees: dict[int, Tree] = {}
        paths: dict[Owner, list[Node]] = {}
        for walk in walks:
            if (sample_id := walk.trajectory.sample.sample_id) in mine:
                if sample_id not in trees:
                    trees[sample_id] = Tree(state_at(walk.trajectory, 0), self.rules)
                paths[walk.owner] = trees[sample_id].add(walk.trajectory, walk.cuts, owner=walk.owner)
        return trees, paths

    def _grow(self, trees: Sequence[Tree], waves: Waves) -> None:
        """One wave: what each tree selects, sampled and backed up."""
        chosen = [(tree, _begin(tree)) for tree in trees for _ in range(self.budget.num_per_round)]
        requests = []
        num_asked: dict[State, int] = {}
        for _, node in chosen:
            assert node.state is not None
            index = len(node.returns) + num_asked.get(node.state, 0)
            num_asked[node.state] = num_asked.get(node.state, 0) + 1
            requests.append(waves.request(node.state, index))
        for (tree, node), made in zip(chosen, waves.continue_states(requests), strict=True):
            for above in node.lineage():
                above.pending -= 1
            if not made.failure:
                tree.add(made, self.splitter.cuts(made), start=node)

    def _top_up(self, paths: dict[Owner, list[Node]], trees: dict[int, Tree], waves: Waves) -> None:
        """Sample what the values lack, in one wave."""
        missing: dict[State, tuple[int, Node]] = {}
        for owner, path in paths.items():
            for node in path:
                assert node.state is not None
                # All responses that pass lack as many: each has one return here.
                missing[node.state] = self.budget.num_least - len(node.returns_without(owner)), node
        requests, places = [], []
        for state, (num, node) in missing.items():
            requests += [waves.request(state, len(node.returns) + extra) for extra in range(num)]
            places += [node] * num
        for node, made in zip(places, waves.continue_states(requests), strict=True):
            if not made.failure:
                trees[made.sample.sample_id].add(made, self.splitter.cuts(made), start=node)


def _begin(tree: Tree) -> Node:
    """Select, and mark the way as being under way, so that a wave spreads."""
    node = tree.select()
    for above in node.lineage():
        above.pending += 1
    return node
