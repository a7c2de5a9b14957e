"""Values are plain means of fresh continuations: right on average, shared between equal states, never of themselves."""

from dataclasses import replace
from math import sqrt

import pytest

from conformance.doubles.ranks import together
from conformance.doubles.refusals import refused
from conformance.doubles.vineppo_locks import STOP, LockPolicy, trajectory_of, value_of, waves_of
from rollmatch.objectives.vineppo.split import FixedTokens
from rollmatch.objectives.vineppo.value import ContinuationValues, ValueRules

EVERY = FixedTokens(num_tokens=1)
MISALIGNED = "continuation-misaligned"


def values_of(trajectories, rules=None, *, policy=None, ranks=None, **seeds):
    cuts = [EVERY.cuts(trajectory) for trajectory in trajectories]
    waves = waves_of(policy or LockPolicy(), ranks, **seeds)
    return ContinuationValues(rules or ValueRules(num_continuations=9)).values_of(trajectories, cuts, waves)


def exact(trajectory):
    return [value_of(trajectory.token_ids[:place]) for place in range(len(trajectory.token_ids))]


def errors_of(num_continuations, *, num_runs):
    """(estimate - truth) of states that are neither sure nor hopeless, with their exact values."""
    found = []
    for run in range(num_runs):
        trajectory = LockPolicy().answer(run + 1)[0]
        valued = values_of([trajectory], ValueRules(num_continuations=num_continuations), run_seed=run)[0]
        pairs = zip(valued.values, exact(trajectory), strict=True)
        found += [(value - truth, truth) for value, truth in pairs if 0.05 < truth < 0.95]
    return found


@pytest.mark.scenario(clauses=["vineppo/a-value-is-the-plain-mean-of-fresh-continuations#1"])
@pytest.mark.parametrize("num_continuations", [1, 9, 36])
def test_the_error_falls_with_the_root_of_the_number_of_continuations(num_continuations):
    found = errors_of(num_continuations, num_runs=40)
    scaled = [error / sqrt(truth * (1 - truth) / num_continuations) for error, truth in found]
    assert len(scaled) > 80
    assert sum(scaled) / len(scaled) == pytest.approx(0, abs=0.25)
    assert sum(z * z for z in scaled) / len(scaled) == pytest.approx(1, rel=0.35)


def test_the_end_and_hopeless_states_have_their_exact_values():
    trajectory = trajectory_of((0, 1, 0, 0, 2, 0, STOP))  # wrong at place 1
    values = values_of([trajectory])[0].values
    assert values[2:] == (0.0,) * 5
    right = trajectory_of((0, 0, 0, 0, 2, 0, STOP))
    assert values_of([right])[0].values[5:] == (1.0, 1.0)


@pytest.mark.scenario("vineppo/eight-responses-to-one-prompt", clauses=["vineppo/states-are-prefixes-of-token-ids#3"])
def test_states_are_valued_once_for_all_ranks():
    siblings = [trajectory_of((0, 0, symbol, 0, 2, 0, STOP)) for symbol in range(4)]
    policies, single = [LockPolicy(), LockPolicy()], LockPolicy()

    def rank(member):
        return values_of(siblings[member.rank :: 2], policy=policies[member.rank], ranks=member)

    halves = together(2, rank)
    whole = values_of(siblings, policy=single)
    assert [halves[0][0], halves[1][0], halves[0][1], halves[1][1]] == whole
    assert whole == [values_of([sibling])[0] for sibling in siblings], "sharing changes nothing but the cost"
    counts = [policy.num_continuations for policy in policies]
    assert sum(counts) == single.num_continuations == 9 * (3 + 4 * 4)
    assert abs(counts[0] - counts[1]) <= 1
    prefixes = [request.state.prefix_token_ids for request in single.requested[0]]
    assert prefixes == sorted(prefixes), "requests with one prefix stand together"
    assert len({request.seed for request in single.requested[0]}) == len(prefixes)


@pytest.mark.scenario(
    "vineppo/the-budget-shrinks-with-the-prefix",
    "vineppo/no-value-is-bought-for-a-finished-response",
    clauses=["vineppo/a-value-is-the-plain-mean-of-fresh-continuations#4"],
)
def test_nothing_is_asked_of_a_finished_response_and_budgets_shrink():
    policy = LockPolicy()
    values_of([trajectory_of((0, 0, 0, 0, 2, 0, STOP))], policy=policy)
    (requests,) = policy.requested
    assert sorted({request.state.position for request in requests}) == list(range(7))
    assert all(
        request.state.budget_left(policy.max_new_tokens) == policy.max_new_tokens - request.state.position
        for request in requests
    )


class Halfway(LockPolicy):
    """Every continuation returns 0.5."""

    def continue_states(self, requests):
        made = super().continue_states(requests)
        return [replace(one, rewards=((len(one.token_ids), 0.5),)) for one in made]


@pytest.mark.scenario(
    "vineppo/siblings-of-two-processes",
    clauses=["vineppo/other-responses-may-stand-in-for-continuations#2,3,4"],
)
def test_siblings_are_those_of_all_ranks():
    paid = [(1.0, (0, 0)), (0.0, (0, 1))]
    responses = [replace(trajectory_of(ids), rewards=((2, reward),)) for reward, ids in paid]
    policies = [Halfway(), Halfway()]

    def work(member):
        waves = waves_of(policies[member.rank], member)
        valuer = ContinuationValues(ValueRules(num_continuations=3, siblings="all"))
        return valuer.values_of([responses[member.rank]], [(0, 1, 2)], waves)

    (first,), (second,) = together(2, work)
    assert first.values == pytest.approx((1 / 3, 1 / 3))
    assert second.values == pytest.approx((2 / 3, 2 / 3))
    continued = [request.state.prefix_token_ids for policy in policies for call in policy.requested for request in call]
    assert sorted(continued) == [(), (), (0,), (0,)]


@pytest.mark.scenario(
    clauses=[
        "vineppo/a-value-is-the-plain-mean-of-fresh-continuations#2",
        "vineppo/other-responses-may-stand-in-for-continuations#2,3",
    ]
)
def test_siblings_stand_in_for_continuations_but_never_for_themselves():
    policy = LockPolicy()
    right, wrong = (0, 0, 0, 0, 2, 0, STOP), (0, 1, 0, 0, 2, 0, STOP)
    siblings = [trajectory_of(ids) for ids in (right, wrong, wrong)]
    valued = values_of(siblings, ValueRules(num_continuations=2, siblings="prompt"), policy=policy)
    assert [one.values[0] for one in valued] == [0.0, 0.5, 0.5]
    assert [one.counts for one in valued] == [(2,) * 7] * 3
    assert 0 not in {request.state.position for request in policy.requested[0]}
    policy = LockPolicy()
    siblings = [trajectory_of(ids) for ids in (right, (0, 0, 1, 0, 2, 0, STOP))]
    valued = values_of(siblings, ValueRules(num_continuations=3, siblings="all"), policy=policy)
    assert [one.counts for one in valued] == [(3,) * 7] * 2, "missing ones are topped up with continuations"
    assert policy.num_continuations == 3 * 2 + 2 * 4 * 3


def test_a_second_go_is_only_for_states_that_differ():
    policy = LockPolicy()
    rules = ValueRules(num_continuations=9, first_continuations=3)
    valued = values_of([trajectory_of((0, 0, 0, 0, 2, 0, STOP))], rules, policy=policy)[0]
    assert len(policy.requested) == 2
    assert set(valued.counts) == {3, 9}
    assert valued.counts[5:] == (3, 3)
    for count, value in zip(valued.counts, valued.values, strict=True):
        assert count == 9 or value in (0.0, 1.0)


class Disobedient(LockPolicy):
    """Changes what it wrote."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def continue_states(self, requests):
        return self.change(super().continue_states(requests))


@pytest.mark.scenario(clauses=["vineppo/states-are-prefixes-of-token-ids#4"])
@pytest.mark.parametrize(
    ("change", "code", "key"),
    [
        (lambda made: [replace(one, policy_version=2) for one in made], "continuation-outdated", "x:1"),
        (lambda made: [replace(one, token_ids=(3, *one.token_ids[1:])) for one in made], MISALIGNED, "x:1"),
        (lambda made: [replace(one, token_ids=(*one.token_ids, 0)) for one in made], "continuation-too-long", "x:1"),
        (lambda made: made[1:], MISALIGNED, "continuations"),
    ],
)
def test_a_continuation_that_is_none_is_refused(change, code, key):
    trajectory = trajectory_of((0, 0, 0, 0, 2, 0, STOP))
    with refused(code, key):
        values_of([trajectory], policy=Disobedient(change))
    values_of([trajectory], policy=Disobedient(lambda made: made))
