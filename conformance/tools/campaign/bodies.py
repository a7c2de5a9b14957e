"""Many wrong bodies of each dialect to one real server: one after the other, and at once in the midst of an update."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from conformance.doubles.fuzzed_bodies import BODIES, calls, encoded, is_not_of_groups
from conformance.doubles.instance import ENGINE, free_port, running
from conformance.judge.servers.bounded import in_thread
from conformance.tools.campaign.attack import AttackedServer, judged, report
from rollmatch.weights.group_store import DROP

AT_ONCE, IN_STATE, STATE_AFTER = 100, 25, 400
"""Bodies before the time is read; of a state, at once; before the next state."""
STATES = ("paused", "announced", "staged")
"""Generation is held; workers wait for an update's bytes; they hold its weights, which nobody has committed."""
OF_FOREIGN_GROUPS = ("/init_communicator/", "/init_weight_transfer_engine/")
"""Routes that wait for a learner of another dialect, as long as vLLM lets them."""
STATE_S, OK = 0.5, 200


def drawn(dialect, num, seed, *, of_groups=False):
    """Routes and bodies of a dialect that are right, or wrong in up to two places, and their form."""
    found = []
    routes = calls(dialect).filter(
        lambda call: call[0] not in OF_FOREIGN_GROUPS if of_groups else is_not_of_groups(call)
    )

    @seeded(seed)
    @settings(
        max_examples=num,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
        deadline=None,
    )
    @given(routes, st.sampled_from(["json"] * 8 + ["msgpack", "damaged"]))
    def draw(call, form):
        found.append((*call, form))

    draw()
    return found


def send_bodies(attacked, dialect, *, num, seed, minutes):
    """``num`` bodies of a dialect; returns how often a status came, of those in states with the state's name."""
    deadline, statuses, states = time.monotonic() + 60 * minutes, Counter(), 0
    while statuses.total() < num and time.monotonic() < deadline:
        for route, body, form in drawn(dialect, min(num - statuses.total(), AT_ONCE), f"{seed}-{statuses.total()}"):
            raw, kind = encoded(body, form)
            statuses[attacked.post(route, raw, headers={"content-type": kind})] += 1
        if statuses.total() >= STATE_AFTER * states:
            state, states = STATES[(states + len(dialect)) % len(STATES)], states + 1
            statuses.update(f"{state} {each}" for each in send_in_state(attacked, dialect, state, f"{seed}-{states}"))
    return statuses


def send_in_state(attacked, dialect, state, seed) -> Iterator[int]:
    """Statuses of bodies that come at once in the midst of an update, half of them in its client's name.

    Whatever they do to it, the next update is received and serves what its weights write.
    """
    with held(attacked, state) as sync_id:
        waiting = []
        for place, (route, body, form) in enumerate(drawn(dialect, IN_STATE, seed, of_groups=True)):
            if isinstance(body, dict) and "client" in body and place % 2:
                body |= {"client": attacked.learner.client} | ({"sync_id": sync_id} if "sync_id" in body else {})
            raw, kind = encoded(body, form)
            waiting.append(in_thread(attacked.post, route, raw, headers={"content-type": kind}))
        time.sleep(STATE_S)
    yield from (call.result() for call in waiting)
    attacked.learner.close(force=True)
    attacked.learner.port = free_port()  # the store of the group that was left may still answer at the other one
    if attacked.learner.open()[0] != OK or attacked.sync(attacked.chance.choice(attacked.policies)) != OK:
        attacked.wrong.append(f"no update after bodies of {dialect} while one was {state}")
    attacked.check_responses()


@contextmanager
def held(attacked, state):
    """An update that has come as far as ``state``; afterwards it is committed or dropped, unless a body did so."""
    learner, version = attacked.learner, attacked.server.version + 1
    if state == "paused":
        attacked.post("/pause/?mode=keep", {})
        yield ""
        attacked.post("/resume/", {})
        return
    weights, name = attacked.chance.choice(attacked.policies), f"{state}-{version}"
    announcement = learner.announcement(weights, version=version, sync_id=name, commit=state == "announced")
    if learner.announce(announcement) is not None:
        attacked.wrong.append(f"a right announcement was refused: {learner.call.result()}")
        yield name
        return
    if state == "staged":
        learner.send(announcement, weights)
        learner.call.result()
    yield name
    is_dropped = attacked.chance.random() < 0.5
    if state == "staged":
        attacked.post(
            f"/native/sync/{'drop' if is_dropped else 'commit'}/", {"client": learner.client, "sync_id": name}
        )
    elif is_dropped or learner.call.done():
        learner.group.store.give_verdict(name, DROP)
    else:
        learner.send(announcement, weights)
    learner.call.result()


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
        show(f"{dialect}, seed {seed}: {sum(statuses.values())} bodies, {dict(sorted(statuses.items(), key=str))}")
    return sum(sum(each.values()) for each in sent.values()), report(attacked, looks, show)
