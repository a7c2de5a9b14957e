"""Splits on nodes: every GPU is used once, and what cannot be placed is not proposed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.forecasts import split
from conformance.doubles.refusals import refused
from rollmatch.plan.layout import lay_out
from rollmatch.plan.proposal import propose
from rollmatch.plan.workload import Split, splits_of

NODES = st.lists(st.integers(1, 8), min_size=1, max_size=4)


def fits(layout, nodes):
    """Whether all parts of a layout fit on the nodes together, each on one; tries every way."""
    parts = sorted([layout.ranks_per_node] * layout.num_learner_nodes + list(layout.servers), reverse=True)

    def place(left, rest):
        if not rest:
            return True
        return any(
            place((*left[:index], size - rest[0], *left[index + 1 :]), rest[1:])
            for index, size in enumerate(left)
            if size >= rest[0]
        )

    return place(tuple(nodes), parts)


@pytest.mark.scenario(clauses=["launchers/a-cluster-s-gpus-are-divided-as-planned#2,3"])
@given(nodes=NODES, tp=st.sampled_from([1, 2, 4]), each=st.sampled_from([None, 1, 2]), data=st.data())
def test_a_layout_has_the_gpus_of_its_split_and_goes_on_the_nodes(nodes, tp, each, data):
    splits = list(splits_of(sum(nodes), tp=tp, colocated=False))
    if not splits:
        return
    one = data.draw(st.sampled_from(splits))
    layout = lay_out(one, nodes, engines_per_server=each)
    if layout is None:
        assert len(nodes) > 1 or each == 2, "on one node every split has a place"
        return
    assert (layout.num_learning, sum(layout.servers)) == (one.num_learning, one.num_serving)
    assert all(size % tp == 0 for size in layout.servers)
    assert each is None or set(layout.servers) == {each * tp}
    assert fits(layout, nodes)


@pytest.mark.parametrize(
    ("serving", "learning", "nodes", "shown"),
    [
        (2, 6, (8,), "6 learner ranks; servers of 2 GPUs"),
        (4, 4, (4, 4), "4 learner ranks; servers of 4 GPUs"),
        (7, 9, (8, 8), None),
        (8, 8, (4, 8, 4), "8 learner ranks; servers of 4, 4 GPUs"),
    ],
)
def test_layouts_by_hand(serving, learning, nodes, shown):
    layout = lay_out(Split(num_serving=serving, num_learning=learning), nodes)
    assert (layout and str(layout)) == shown


def test_an_engine_in_the_learners_process_has_its_ranks_on_one_node():
    together = Split(num_serving=12, num_learning=12, tp=4, is_colocated=True)
    assert lay_out(together, (6, 6)) is None
    assert str(lay_out(together, (8, 8, 8))) == "12 learner ranks, 4 on each of 3 nodes"


@pytest.mark.scenario(clauses=["launchers/a-cluster-s-gpus-are-divided-as-planned#4"])
def test_a_split_that_does_not_divide_over_the_nodes_is_shown_and_not_proposed(forecaster):
    site = forecaster(num_gpus=3, num_nodes=2)
    proposal = propose(site)
    problems = {str(one.split): one.problem for one in proposal.forecasts}
    assert problems["1v5"] == "ranks and servers do not divide over the nodes"
    assert not problems["2v4"]
    assert proposal.best.layout == lay_out(proposal.best.split, (3, 3))
    assert site.forecast(split(1, 5)).layout is None


def test_servers_of_a_size_that_never_fits_are_refused(forecaster):
    with refused("nothing-fits", "--gpus", remedy="vllm_data_parallel_size"):
        propose(forecaster(num_gpus=2, engines_per_server=2))
