"""``python -m benchmarks.rollout.episode_pace``: how busy an engine is while environments take their time.

The engine is simulated: it has slots, and a turn takes one of them for a while. Environments reply after a log-normal
delay. Four times as many episodes as slots. Episodes are played by the code that runs use, with real threads.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np

from conformance.doubles.ladders import TurnSide, world
from conformance.doubles.locks import prompt_of, sample_of
from conformance.doubles.ranks import alone
from rollmatch.environments.episode import Episode
from rollmatch.records import Rollout, RolloutRequest
from rollmatch.rollout.backend import Decoding, make_requests
from rollmatch.rollout.episodes import EpisodeServers, InFlight, begin_all, play_apart, play_in_waves
from rollmatch.rollout.open_groups import OpenGroups
from rollmatch.rollout.prefetch import Prefetch
from rollmatch.rollout.prefetch_rules import PrefetchRules

SLOTS, OVERSUBSCRIPTION, TURNS, GROUP = 16, 4, 4, 4
TURN_S = 0.1
"""Mean of a turn; it is between half of it and one and a half."""
DELAY_S, SIGMA = 0.05, 1.5
"""Median of an environment's reply; the mean is 0.15 s, one of 1,000 takes 5 s."""
LEARN_S, SYNC_S = 0.5, 0.02


class Tool:
    """Replies after a while that follows from the episode's chance; ends after some turns."""

    def __init__(self) -> None:
        self.turns, self.rng = 0, np.random.default_rng(0)

    def reset(self, sample: object, rng: np.random.Generator) -> str:
        """Begin."""
        return "call"

    def clone(self, rng: np.random.Generator) -> "Tool":
        """A copy with another chance."""
        twin = Tool()
        twin.turns, twin.rng = self.turns, rng
        return twin

    def step(self, action: str) -> tuple[str, float, bool, bool]:
        """Wait, then reply."""
        time.sleep(float(self.rng.lognormal(np.log(DELAY_S), SIGMA)))
        self.turns += 1
        return "reply", 0.0, self.turns == TURNS, False

    def fingerprint(self) -> int:
        """The number of turns."""
        return self.turns


class Engine(TurnSide):
    """One server with slots; adds up the seconds for which they are in use. An update stops all of them for a while."""

    num_servers, lost = 1, ()

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.lock, self.busy_s = threading.Semaphore(SLOTS), threading.Lock(), 0.0
        self.stopped_s = 0.0

    def generate_on(
        self, server_index: int, requests: Sequence[RolloutRequest], decoding: Decoding, *, start: int
    ) -> list[Rollout]:
        """Each request takes a slot for its turn; one call of several is a wave."""
        threads = [threading.Thread(target=self._take_slot, args=(request,)) for request in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [self.write(request, decoding) for request in requests]

    def _take_slot(self, request: RolloutRequest) -> None:
        seconds = TURN_S * (0.5 + Random(request.seed).random())
        with self.slots:
            stopped_s, end = self.stopped_s, time.monotonic() + seconds
            while (left_s := end + self.stopped_s - stopped_s - time.monotonic()) > 0:
                time.sleep(left_s)
        with self.lock:
            self.busy_s += seconds

    def update(self) -> None:
        """New weights."""
        self.stopped_s += SYNC_S
        time.sleep(SYNC_S)
        self.version += 1


def requests_of(step: int) -> list[RolloutRequest]:
    """A window: four episodes a slot."""
    samples = [sample_of(number // GROUP) for number in range(SLOTS * OVERSUBSCRIPTION)]
    return make_requests(samples, prompt_of=prompt_of, run_seed=1, step=step, rank=0)


def play_one_by_one(engine: Engine, episodes: Sequence[Episode]) -> None:
    """Waves as before episodes had a pace of their own (commit 6c3104f2): one environment after the other."""
    while live := [episode for episode in episodes if episode.wants_turn]:
        rollouts = engine.generate_on(0, [episode.request() for episode in live], engine.decoding, start=0)
        for episode, rollout in zip(live, rollouts, strict=True):
            episode.take(rollout)


def play_waves(engine: Engine, episodes: Sequence[Episode]) -> None:
    """Waves, whose environments work at the same time."""

    def generate(requests: Sequence[RolloutRequest], decoding: Decoding) -> list[Rollout]:
        return engine.generate_on(0, requests, decoding, start=0)

    play_in_waves(episodes, engine.decoding, generate=generate, ranks=alone())


def play_own_pace(engine: Engine, episodes: Sequence[Episode]) -> None:
    """Each at its own pace."""
    play_apart(episodes, lambda place, request: engine.generate_on(0, [request], engine.decoding, start=place)[0])


def in_lockstep(play: Callable[[Engine, Sequence[Episode]], None], num_windows: int) -> dict[str, float]:
    """Windows one after the other, without the time of learning."""
    engine, began = Engine(), time.perf_counter()
    for step in range(num_windows):
        play(engine, begin_all(world(Tool, max_response_tokens=1000), requests_of(step), engine.decoding))
    return figures(engine.busy_s, time.perf_counter() - began, num_windows)


def ahead(in_flight: InFlight, num_windows: int, *, lead: int) -> dict[str, float]:
    """``lead`` windows ahead of a learner that learns and sends weights; measured until the last one is requested."""
    engine, began = Engine(), time.perf_counter()
    in_world = replace(world(Tool, max_response_tokens=1000), may_move=in_flight == "keep")
    servers = EpisodeServers(engine, in_world, in_flight=in_flight)
    prefetch = Prefetch(servers, engine.decoding, PrefetchRules(max_windows=lead + 1, callers_per_server=lead + 1))
    measured = (0.0, 0.0)
    for step in range(num_windows):
        with ExitStack() as quiet:
            if in_flight == "wait":
                quiet.enter_context(prefetch.quiet())
            else:
                quiet.enter_context(prefetch.held())
                quiet.enter_context(servers.held())
            engine.update()
        for coming in range(step, min(step + lead + 1, num_windows)):
            if coming not in prefetch.windows:
                prefetch.submit(coming, requests_of(coming))
        prefetch.collect(step, min_version=0)
        prefetch.forget(step)
        if step + lead + 1 == num_windows:
            measured = engine.busy_s, time.perf_counter() - began
        time.sleep(LEARN_S)
    prefetch.close()
    return figures(*measured, num_windows - lead)


def first_complete(num_windows: int, *, lead: int, late: int) -> dict[str, float]:
    """As ``ahead`` with ``keep``; a step takes the first complete groups. ``held_s``: of a sync, per window; no turn
    begins then.
    """
    engine, began = Engine(), time.perf_counter()
    servers = EpisodeServers(engine, replace(world(Tool, max_response_tokens=1000), may_move=True), in_flight="keep")
    oldest, per_step = lead + late, SLOTS * OVERSUBSCRIPTION // GROUP
    rules = PrefetchRules(max_windows=lead + 1 + oldest, callers_per_server=(lead + 1) * per_step, group_size=GROUP)
    prefetch, groups = Prefetch(servers, engine.decoding, rules), OpenGroups(lead=lead, max_staleness=oldest)
    measured, num_late, held_s = (0.0, 0.0), 0, 0.0
    for step in range(num_windows):
        holds = time.perf_counter()
        with prefetch.held(), servers.held():
            engine.update()
        held_s += time.perf_counter() - holds
        coming = range(step, min(step + lead + 1, num_windows))
        for window in coming:
            if window not in groups.left:
                groups.open(window, per_step)
                prefetch.submit(window, requests_of(window), groups=groups.request(window, step=step))
        sizes = [(window, per_step) for window in coming]
        chosen = prefetch.wait_for_groups(step, partial(groups.choose, coming=sizes))
        groups.take(step, chosen)
        prefetch.take(chosen, left=[window for window, places in groups.left.items() if places])
        num_late += sum(group.window < step for group in chosen)
        if step + lead + 1 == num_windows:
            measured = engine.busy_s, time.perf_counter() - began
        time.sleep(LEARN_S)
    prefetch.close()
    late_share = num_late / (num_windows * per_step)
    return figures(*measured, num_windows - lead) | {"late_share": late_share, "held_s": held_s / num_windows}


def figures(busy_s: float, seconds: float, num_windows: int) -> dict[str, float]:
    """Share of all slots' time that is in use."""
    return {"busy_share": busy_s / seconds / SLOTS, "seconds_per_window": seconds / num_windows}


def main() -> None:
    """Write a line of JSON for each way to play."""
    measured: tuple[tuple[str, Callable[[], dict[str, float]]], ...] = (
        ("lockstep, waves, one environment at a time", partial(in_lockstep, play_one_by_one, 1)),
        ("lockstep, waves", partial(in_lockstep, play_waves, 3)),
        ("lockstep, own pace", partial(in_lockstep, play_own_pace, 6)),
        ("ahead, wait, 2 windows", partial(ahead, "wait", 8, lead=2)),
        ("ahead, keep, 2 windows", partial(ahead, "keep", 10, lead=2)),
        ("ahead, keep, 6 windows", partial(ahead, "keep", 16, lead=6)),
        ("first complete, 1 window, 2 late", partial(first_complete, 24, lead=1, late=2)),
        ("first complete, 2 windows, 3 late", partial(first_complete, 24, lead=2, late=3)),
        ("first complete, 2 windows, 6 late", partial(first_complete, 24, lead=2, late=6)),
        ("ahead, restart, 2 windows", partial(ahead, "restart", 6, lead=2)),
    )
    for name, measure in measured:
        row = {key: round(value, 3) for key, value in measure().items()}
        sys.stdout.write(json.dumps({"way": name} | row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
