"""prefetch: overlap, staleness, order, and that nobody waits for ever."""

import time
from collections import deque
from types import SimpleNamespace

import pytest

from conformance.harness.schedule import explore
from conformance.scenarios.configs import config_with, not_refused, refusal_of
from conformance.scenarios.prefetching import GREEDY, AheadWorld, requests_of, rollouts_of
from rollmatch.cli.assemble import make_overlap
from rollmatch.ranks import Ranks
from rollmatch.rollout.phase import Ahead, RequestedWindow
from rollmatch.rollout.prefetch import Prefetch, PrefetchOverfull, PrefetchRules

OVERLAP, STALENESS = "~.overlap", "~.max_staleness"
SERVED = ("~.vllm.mode=server", "~.vllm.server.base_url=http://127.0.0.1:8000", "~.vllm.server.group_port=51216")
LONG = "custom.extra.rollout_matching"
WINDOW_OF_FOUR = (
    "custom.trainer_variant=grpo",
    "~.decoding.temperature=1",
    "custom.extra.grpo.rewards=[{function: builtins:len}]",
    "custom.extra.grpo.correction_cap=2",
    "custom.extra.grpo.num_iterations=2",
    "custom.extra.grpo.steps_per_generation=2",
    "training.packing=false",
)


@pytest.mark.scenario("prefetch/an-unknown-mode-is-refused", clauses=["prefetch/overlap-is-chosen-in-yaml#1"])
def test_an_unknown_mode_is_refused_and_the_three_are_taken():
    assert refusal_of(f"{OVERLAP}=async", *SERVED) == ("not-a-choice", f"{LONG}.overlap")
    with not_refused():
        for mode in ("off", "stream", "ahead"):
            assert config_with(f"{OVERLAP}={mode}", *SERVED).custom.extra.rollout_matching.overlap == mode


@pytest.mark.scenario(
    "prefetch/a-staleness-of-zero-is-refused",
    "prefetch/a-staleness-of-one-is-accepted",
    clauses=["prefetch/overlap-is-chosen-in-yaml#6"],
)
def test_a_staleness_is_a_whole_number_from_one():
    for value, code in (("0", "out-of-range"), ("-1", "out-of-range"), ("1.5", "wrong-type"), ("true", "wrong-type")):
        found = refusal_of(f"{OVERLAP}=ahead", f"{STALENESS}={value}", *SERVED)
        assert found == (code, f"{LONG}.max_staleness")
    with not_refused():
        for value in (1, 2, 7):
            config = config_with(f"{OVERLAP}=ahead", f"{STALENESS}={value}", *SERVED)
            assert config.custom.extra.rollout_matching.max_staleness == value


@pytest.mark.parametrize("mode", ["stream", "ahead"])
@pytest.mark.parametrize("where", [(), ("~.rollout_backend=hf", "~.vllm.max_model_len=null")])
def test_nothing_overlaps_inside_one_process(mode, where):
    assert refusal_of(f"{OVERLAP}={mode}", *where) == ("overlap-needs-servers", f"{LONG}.overlap")
    with not_refused():
        config_with(f"{OVERLAP}={mode}", *SERVED)
        config_with(f"{OVERLAP}=off", *where)


def test_rows_that_are_chosen_from_a_whole_step_cannot_stream():
    assert refusal_of(f"{OVERLAP}=stream", "training.packing=true", *SERVED) == (
        *("stream-needs-padded-batches", f"{LONG}.overlap"),
    )
    with not_refused():
        config_with(f"{OVERLAP}=stream", "training.packing=false", *SERVED)
        config_with(f"{OVERLAP}=ahead", f"{STALENESS}=2", "training.packing=true", *SERVED)


def test_a_segment_that_waits_for_a_row_needs_a_step_of_the_staleness():
    packed = (f"{OVERLAP}=ahead", "training.packing=true", *SERVED)
    assert refusal_of(*packed) == ("carry-needs-staleness", f"{LONG}.max_staleness")
    with not_refused():
        config_with(*packed, f"{STALENESS}=2")
        config_with(f"{OVERLAP}=ahead", *SERVED)


@pytest.mark.scenario(clauses=["prefetch/overlap-is-chosen-in-yaml#5"])
def test_who_says_nothing_never_learns_from_old_rollouts():
    with not_refused():
        assert config_with().custom.extra.rollout_matching.overlap == "off"
        assert config_with(*SERVED).custom.extra.rollout_matching.overlap == "off"


class AnsweringServers:
    """Two servers that answer at once, by the version that is set."""

    num_servers, policy_version = 2, 3

    def __init__(self):
        self.asked = []

    def generate_on(self, server_index, requests, decoding, *, start):
        self.asked += [request.sample.sample_id for request in requests]
        return rollouts_of(requests, self.policy_version)


@pytest.mark.scenario("prefetch/an-old-rollout-is-made-anew", clauses=["prefetch/staleness-is-known-and-bounded#2,3"])
@pytest.mark.parametrize(
    ("step_of", "times_asked", "age"),
    [
        ({3: 5, 4: 6, 5: 7}, 2, {0: 4}),
        ({3: 6, 4: 7}, 1, {1: 4}),
        ({3: 6, 4: 7, 5: 7}, 1, {1: 4}),  # servers that were started again
        ({3: 7, 4: 7, 5: 7}, 1, {0: 4}),
        ({2: 3, 3: 5, 4: 7}, 2, {0: 4}),  # two optimizer steps between two syncs
    ],
)
def test_a_rollout_that_is_too_old_is_dropped_and_its_sample_asked_for_again(step_of, times_asked, age):
    version = max(step_of)
    servers = AnsweringServers()
    prefetch = Prefetch(servers, GREEDY, PrefetchRules(max_windows=2, callers_per_server=1))
    ahead = Ahead(None, prefetch, max_staleness=1, lead=1)
    with prefetch.quiet():
        pass
    prefetch.ask(7, requests_of(0, 4), (4,))
    prefetch.wait_for(7)
    with prefetch.quiet():
        servers.policy_version = version
    wanted = [RequestedWindow(7, [request.sample for request in requests_of(0, 4)])]
    collected = ahead.collect(wanted, None, step_of=step_of)
    prefetch.close()
    assert sorted(servers.asked) == sorted([0, 1, 2, 3] * times_asked)
    assert [rollout.response_token_ids for rollout in collected.rollouts] == [(0,), (1,), (2,), (3,)]
    assert collected.num_regenerated == 4 * (times_asked - 1)
    assert collected.staleness == age


@pytest.mark.parametrize(
    ("overrides", "lead", "oldest"),
    [
        (("~.max_staleness=3", "training.packing=false"), 3, 3),
        (("~.max_staleness=3", "training.packing=true"), 2, 3),
        (("~.max_staleness=7", *WINDOW_OF_FOUR), 1, 4),
    ],
)
def test_the_staleness_is_told_in_optimizer_steps_and_counts_to_the_last_of_a_window(overrides, lead, oldest):
    source = SimpleNamespace(fence=SimpleNamespace(backend=AnsweringServers()), decoding=GREEDY, ranks=Ranks())
    ahead = make_overlap(config_with(*SERVED, f"{OVERLAP}=ahead", *overrides), source)
    ahead.prefetch.close()
    assert (ahead.lead, ahead.max_staleness) == (lead, oldest)


@pytest.mark.scenario(clauses=["prefetch/a-stuck-prefetcher-is-an-error#2"])
def test_what_waits_to_be_learnt_is_bounded_in_number_and_in_bytes():
    servers = AnsweringServers()
    rules = PrefetchRules(max_windows=2, callers_per_server=1, max_bytes=16)  # each rollout counts 16
    prefetch = Prefetch(servers, GREEDY, rules)
    with prefetch.quiet():
        pass
    for step in (0, 1):
        prefetch.ask(step, requests_of(step, 4), (1, 1, 1, 1))
    with pytest.raises(PrefetchOverfull) as caught:
        prefetch.ask(2, requests_of(2, 4), (4,))
    assert (caught.value.code, caught.value.key) == ("prefetch-overfull", "2")
    prefetch.wait_for(0)
    time.sleep(0.2)
    assert sorted(servers.asked) == [0, 1, 2, 3], "of the second window nothing is asked for while the first waits"
    assert len(prefetch.collect(0, min_version=3)[0]) == len(prefetch.collect(1, min_version=3)[0]) == 4
    prefetch.ask(2, requests_of(2, 4), (4,))
    assert len(prefetch.collect(2, min_version=3)[0]) == 4
    prefetch.close()


class Hasty(Prefetch):
    """Weights move while calls are under way."""

    def _wait(self, condition):
        if not self._held:
            super()._wait(condition)


class Early(Prefetch):
    """Calls begin before the first sync."""

    def ask(self, step, requests, parts):
        self._held = False
        super().ask(step, requests, parts)


class Guarded(Prefetch):
    """The guard covers all of a caller's work, and the call inside waits for it once more."""

    def _answer(self, lot):
        with self.monitor:
            self.monitor.wait(lambda: not self._held)
        super()._answer(lot)


@pytest.mark.scenario(
    "prefetch/every-interleaving-of-prefetch-and-sync-ends",
    clauses=["prefetch/nothing-is-requested-before-the-weights-are-right#2,3"],
)
@pytest.mark.parametrize(
    "shape", [{}, {"num_steps": 3}, {"num_steps": 3, "max_staleness": 2}, {"num_steps": 1, "callers": 2, "size": 2}]
)
def test_every_order_ends_and_no_response_has_two_versions(shape):
    found = explore(lambda: AheadWorld(**shape))
    assert [(trouble.problem, trouble.order) for trouble in found.troubles] == []
    assert found.num_orders > 100


class ForgetfulPrefetch(Prefetch):
    """What moves to another server also stays where it was."""

    def _begin(self, server):
        before = [deque(queue) for queue in self._queues]
        lot = super()._begin(server)
        if lot is not None and all(lot not in queue for queue in before):
            self._queues[1 - server].append(lot._replace(server_index=1 - server))
        return lot


LATE = {"num_steps": 1, "num_servers": 2, "size": 2, "pieces": 2}


def test_late_work_moves_in_every_order_and_is_asked_for_once():
    found = explore(lambda: AheadWorld(**LATE))
    assert [(trouble.problem, trouble.order) for trouble in found.troubles] == []
    assert found.num_orders > 100
    doubled = explore(
        lambda: AheadWorld(**LATE, kind=ForgetfulPrefetch), until=lambda problem: problem.startswith("asked for")
    )
    assert doubled.troubles[-1].problem.startswith("asked for"), "the scheduler sees what is asked for twice"


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Hasty, "a response has tokens of versions 1 and 2"),
        (Hasty, "a token is written while weights are pushed"),
        (Guarded, "deadlock: rank 0 at wait, rank 1 at wait"),
    ],
)
def test_the_scheduler_sees_a_prefetch_that_is_wrong(kind, problem):
    assert explore(lambda: AheadWorld(kind=kind), until=problem.__eq__).troubles[-1].problem == problem
