"""prefetch: overlap, staleness, order, and that nobody waits for ever."""

import threading
import time
from types import SimpleNamespace

import pytest

from conformance.doubles.configs import GRPO, config_with, refusal_of
from conformance.doubles.prefetching import GREEDY, Servers, opened, requests_of, until
from conformance.doubles.refusals import refused
from rollmatch.ranks import Ranks
from rollmatch.rollout.overlap import Ahead, RequestedWindow
from rollmatch.run.assemble import make_overlap

OVERLAP, STALENESS = "~.overlap", "~.max_staleness"
SERVED = ("~.vllm.mode=server", "~.vllm.server.base_url=http://127.0.0.1:8000", "~.vllm.server.group_port=51216")
LONG = "custom.extra.rollout_matching"
WINDOW_OF_FOUR = (
    *GRPO,
    "custom.extra.grpo.correction_cap=2",
    "custom.extra.grpo.num_iterations=2",
    "custom.extra.grpo.steps_per_generation=2",
    "training.packing=false",
)


HERE = ("~.rollout_backend=hf", "~.vllm.max_model_len=null")
AHEAD, PACKED = f"{OVERLAP}=ahead", "training.packing=true"


@pytest.mark.scenario(
    "prefetch/an-unknown-mode-is-refused",
    "prefetch/a-staleness-of-zero-is-refused",
    "prefetch/a-staleness-of-one-is-accepted",
    clauses=["prefetch/overlap-is-off-or-ahead#1,4,5"],
)
@pytest.mark.parametrize(
    ("bad", "code", "key"),
    [
        ((f"{OVERLAP}=async", *SERVED), "not-a-choice", "overlap"),
        *(((AHEAD, *where), "overlap-needs-servers", "overlap") for where in ((), HERE)),
        ((AHEAD, PACKED, *SERVED), "carry-needs-staleness", "max_staleness"),  # a segment may wait for a row
        *(((AHEAD, f"{STALENESS}={value}", *SERVED), "out-of-range", "max_staleness") for value in ("0", "-1")),
        *(((AHEAD, f"{STALENESS}={value}", *SERVED), "wrong-type", "max_staleness") for value in ("1.5", "true")),
    ],
)
def test_what_cannot_overlap_is_refused(bad, code, key):
    assert refusal_of(*bad) == (code, f"{LONG}.{key}")


@pytest.mark.parametrize(
    ("overrides", "overlap", "staleness"),
    [
        ((), "off", 1),
        (SERVED, "off", 1),
        ((f"{OVERLAP}=off", *HERE), "off", 1),
        ((AHEAD, *SERVED), "ahead", 1),
        ((AHEAD, PACKED, f"{STALENESS}=2", *SERVED), "ahead", 2),
        ((AHEAD, f"{STALENESS}=7", *SERVED), "ahead", 7),
    ],
)
def test_what_can_overlap_is_accepted(overrides, overlap, staleness):
    matching = config_with(*overrides).custom.extra.rollout_matching
    assert (matching.overlap, matching.max_staleness) == (overlap, staleness)


@pytest.mark.scenario("prefetch/the-removed-mode-is-refused", clauses=["prefetch/overlap-is-off-or-ahead#6"])
def test_the_removed_mode_and_its_key_are_refused():
    with refused("not-a-choice", f"{LONG}.overlap", problem="stream is removed", remedy="Set it to ahead"):
        config_with(f"{OVERLAP}=stream", *SERVED)
    with refused("removed-key", f"{LONG}.graphs_kept", remedy="overlap stream"):
        config_with("~.graphs_kept=2", f"{OVERLAP}=ahead", *SERVED)


def samples_asked(servers):
    return sorted(sample_id for _, ids in servers.asked for sample_id in ids)


@pytest.mark.scenario(
    "prefetch/an-old-rollout-is-requested-again", clauses=["prefetch/staleness-is-known-and-bounded#2,3"]
)
@pytest.mark.parametrize(
    ("step_of", "max_staleness", "num_times", "age"),
    [
        ({3: 5, 4: 6, 5: 7}, 1, 2, 0),
        ({3: 6, 4: 7}, 1, 1, 1),
        ({3: 6, 4: 7, 5: 7}, 1, 1, 1),  # servers that were started again
        ({3: 7, 4: 7, 5: 7}, 1, 1, 0),
        ({2: 3, 3: 5, 4: 7}, 1, 2, 0),  # two optimizer steps between two syncs
        ({2: 3, 3: 5, 4: 7}, 2, 1, 2),
        ({2: 3, 3: 4, 4: 7}, 3, 1, 3),
        ({2: 2, 3: 3, 4: 7}, 3, 2, 0),
    ],
)
def test_a_rollout_that_is_too_old_is_dropped_and_its_sample_requested_again(step_of, max_staleness, num_times, age):
    servers, requests = Servers(version=3), requests_of(0, 8)
    with opened(servers) as prefetch:
        prefetch.submit(7, requests)
        prefetch.wait_for(7)
        with prefetch.quiet():
            servers.version = max(step_of)
        wanted = [RequestedWindow(7, [request.sample for request in requests])]
        ahead = Ahead(None, prefetch, max_staleness=max_staleness, lead=1)
        collected, num_again = ahead.collect(wanted, None, step_of=step_of)
    assert samples_asked(servers) == sorted([*range(8)] * num_times)
    assert [rollout.response_token_ids for rollout in collected.rollouts] == [(number,) for number in range(8)]
    assert num_again == 8 * (num_times - 1)
    assert collected.staleness == {age: 8}


@pytest.mark.parametrize(
    ("overrides", "lead", "oldest"),
    [
        (("~.max_staleness=3", "training.packing=false"), 3, 3),
        (("~.max_staleness=3", "training.packing=true"), 2, 3),
        (("~.max_staleness=7", *WINDOW_OF_FOUR), 1, 4),
    ],
)
def test_the_staleness_counts_optimizer_steps_to_the_last_of_a_window(overrides, lead, oldest):
    source = SimpleNamespace(fence=SimpleNamespace(backend=Servers()), decoding=GREEDY, ranks=Ranks(), world=None)
    ahead = make_overlap(config_with(*SERVED, f"{OVERLAP}=ahead", *overrides), source)
    ahead.prefetch.close()
    assert (ahead.lead, ahead.max_staleness) == (lead, oldest)
    rules = ahead.prefetch.rules
    assert (rules.max_windows, rules.callers_per_server) == (lead + 1, lead)


@pytest.mark.scenario(clauses=["prefetch/a-stuck-prefetcher-is-an-error#2"])
def test_what_waits_to_be_learnt_is_bounded_in_number_and_in_bytes():
    servers = Servers()
    with opened(servers, max_windows=2, callers_per_server=1, max_bytes=16) as prefetch:  # each rollout counts 16
        for step in (0, 1):
            prefetch.submit(step, requests_of(step, 4))
        with refused("prefetch-overfull", "2"):
            prefetch.submit(2, requests_of(2, 4))
        prefetch.wait_for(0)
        time.sleep(0.2)
        assert samples_asked(servers) == [0, 1, 2, 3], "nothing of the second window while the first one waits"
        for step in (0, 1):
            assert len(prefetch.collect(step, min_version=1)[0]) == 4
            prefetch.forget(step)
        prefetch.submit(2, requests_of(2, 4))
        assert len(prefetch.collect(2, min_version=1)[0]) == 4


def test_a_step_that_waits_for_groups_may_ask_for_its_own_window_whatever_waits_of_others():
    """One group of window 0 is late, the other fills the buffer, and step 1 takes those of window 1."""
    servers, late = Servers(1), threading.Event()
    answer = servers.generate_on

    def generate_on(server_index, requests, decoding, *, start):
        if requests[0].sample.sample_id == 0:
            assert late.wait(10)
        return answer(server_index, requests, decoding, start=start)

    servers.generate_on = generate_on
    with opened(servers, max_windows=2, callers_per_server=2, group_size=1, max_bytes=16) as prefetch:
        for step in (0, 1):
            prefetch.submit(step, requests_of(step, 2))
        until(lambda: prefetch.windows[0].complete_groups(1) == {1})
        try:
            taken = prefetch.wait_for_groups(1, lambda groups: [(1, 0), (1, 1)] if len(groups[1]) == 2 else None)
        finally:
            late.set()
    assert taken == [(1, 0), (1, 1)]
