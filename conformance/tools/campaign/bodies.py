"""Many wrong bodies of each dialect, one after the other, to one real server."""

import random
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from conformance.doubles.fuzzed_bodies import BODIES, calls, encoded, is_not_of_groups
from conformance.doubles.instance import ENGINE, running
from conformance.tools.campaign.attack import AttackedServer, judged, report

AT_ONCE = 100
"""Bodies before the time is read."""


def send_bodies(attacked, dialect, *, num, seed, minutes):
    """``num`` bodies of a dialect that are right, or wrong in up to two places; returns how often a status came."""
    deadline, statuses = time.monotonic() + 60 * minutes, Counter()
    while statuses.total() < num and time.monotonic() < deadline:

        @seeded(f"{seed}-{statuses.total()}")
        @settings(
            max_examples=min(num - statuses.total(), AT_ONCE),
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
            deadline=None,
        )
        @given(calls(dialect).filter(is_not_of_groups), st.sampled_from(["json"] * 8 + ["msgpack", "damaged"]))
        def send(call, form):
            raw, kind = encoded(call[1], form)
            statuses[attacked.post(call[0], raw, headers={"content-type": kind})] += 1

        send()
    return statuses


def bodies(seed, *, num, minutes, looks, dialects="", show=print):
    """``num`` bodies of each dialect to one real server; returns their number and what is wrong, in words."""
    chosen = [each for each in sorted(BODIES) if not dialects or each in dialects.split(",")]
    with running(Path(f"/tmp/attacked-{seed}.txt"), engine_arguments=ENGINE, data_parallel_size=1) as one:
        attacked = AttackedServer(one, random.Random(seed))
        attacked.check_responses()
        looks.watch(one.settings.port)
        sent = {each: send_bodies(attacked, each, num=num, seed=seed, minutes=minutes / len(chosen)) for each in chosen}
        attacked.check_responses()
        looks.watch(None)
        attacked.wrong += judged(attacked)
        attacked.leave()
    for dialect, statuses in sent.items():
        show(f"{dialect}, seed {seed}: {sum(statuses.values())} bodies, {dict(sorted(statuses.items()))}")
    return sum(sum(each.values()) for each in sent.values()), report(attacked, looks, show)
