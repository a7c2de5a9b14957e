"""A thousand episodes with slow environments: none starves, and what waits to be learnt from stays bounded."""

import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from conformance.doubles.ladders import Ladder, TurnSide, world
from conformance.doubles.locks import prompt_of, sample_of
from conformance.doubles.prefetching import until
from rollmatch.rollout.backend import make_requests
from rollmatch.rollout.episodes import EpisodeServers
from rollmatch.rollout.open_groups import OpenGroups
from rollmatch.rollout.prefetch import Prefetch
from rollmatch.rollout.prefetch_rules import PrefetchRules

GROUP, PER_STEP, STEPS, LEAD, LATE, CALLERS, SERVERS = 4, 10, 25, 3, 3, 3, 2
BYTES, UNBOUNDED = 4000, 10**9


class Slow(Ladder):
    """Replies after 1 ms in the median; one of a hundred takes 30 ms and more."""

    def clone(self, rng):
        twin = Slow(self.slip)
        twin.rung, twin.rng = self.rung, rng
        return twin

    def step(self, action):
        time.sleep(float(self.rng.lognormal(np.log(0.001), 1.5)))
        return super().step(action)


class Servers(TurnSide):
    num_servers, lost = SERVERS, ()

    def generate_on(self, server_index, requests, decoding, *, start):
        return [self.write(request, decoding) for request in requests]


def requests_of(step):
    samples = [sample_of(step * PER_STEP + place) for place in range(PER_STEP) for _ in range(GROUP)]
    return make_requests(samples, prompt_of=prompt_of, run_seed=1, step=step, rank=0)


class Watch:
    """Samples what waits behind the window that is learnt next, and the threads of episodes."""

    def __init__(self, prefetch):
        self.prefetch, self.step, self.is_over, self.most_bytes, self.most_threads = prefetch, 0, False, 0, 0
        self.thread = threading.Thread(target=self.look)
        self.thread.start()

    def look(self):
        while not self.is_over:
            with self.prefetch.monitor:
                waits = sum(pending.num_bytes for step, pending in self.prefetch.windows.items() if step > self.step)
            threads = Counter(thread.name.rpartition("_")[0] for thread in threading.enumerate())
            self.most_bytes, self.most_threads = max(self.most_bytes, waits), max(self.most_threads, threads["episode"])
            time.sleep(0.001)


@pytest.mark.parametrize("max_bytes", [1, BYTES, UNBOUNDED])
def test_a_thousand_episodes_are_learnt_from_once_and_in_time(max_bytes):
    rules = PrefetchRules(
        max_windows=2 * LEAD + LATE + 1, callers_per_server=CALLERS, group_size=GROUP, max_bytes=max_bytes
    )
    side, groups = Servers(), OpenGroups(lead=LEAD, max_staleness=LEAD + LATE)
    servers = EpisodeServers(side, replace(world(Slow), may_move=True), in_flight="keep")
    prefetch = Prefetch(servers, side.decoding, rules)
    watch, taken, largest, under_way = Watch(prefetch), {}, 0, SERVERS * CALLERS * GROUP
    for step in range(STEPS):
        watch.step = step
        with prefetch.held(), servers.held():
            side.version += 1
        coming = [(window, PER_STEP) for window in range(step, min(step + LEAD + 1, STEPS))]
        for window, _ in coming:
            if window not in groups.left:
                groups.open(window, PER_STEP)
                prefetch.submit(window, requests_of(window), groups=groups.request(window, step=step))
        chosen = prefetch.wait_for_groups(step, partial(groups.choose, coming=coming))
        groups.take(step, chosen)
        requests, rollouts = prefetch.take(chosen, left=[window for window, places in groups.left.items() if places])
        assert [one.request_id for one in requests] == [one.request_id for one in rollouts]
        assert all(side.version - one.policy_version <= LEAD + LATE for one in rollouts)
        taken |= {one.request_id: step for one in rollouts}
        largest = max(largest, *(8 * (len(one.prompt_token_ids) + len(one.response_token_ids)) for one in rollouts))
        if max_bytes == UNBOUNDED and step == STEPS // 2:  # a slow step: all that was requested arrives
            until(lambda size=largest: watch.most_bytes > BYTES + under_way * size)
    watch.is_over = True
    watch.thread.join()
    prefetch.close()
    assert len(taken) == STEPS * PER_STEP * GROUP == 1000
    assert prefetch.windows == {}
    assert watch.most_threads <= 2 * under_way, "environments are reset in threads of their own"
    assert watch.most_bytes < max_bytes + under_way * largest
