"""Episodes that are played while the learner learns: their age, and syncs that come in their midst."""

import random
import threading
import time
from dataclasses import replace

import pytest

from conformance.doubles.ladders import Ladder, TurnSide, world
from conformance.doubles.learner_side import connected, server_of
from conformance.doubles.locks import A, requests_of, sample_of
from conformance.doubles.native_double import NativeDouble, serving, tensors_of
from conformance.doubles.overlapped import attach_servers, note_what_is_learnt
from conformance.doubles.prefetching import until
from conformance.doubles.refusals import refused
from conformance.doubles.small_run import events
from conformance.doubles.turns import make_trainer
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.episodes import EpisodeServers, begin_all, play_apart
from rollmatch.rollout.members import ServerLost, ServerMembers
from rollmatch.rollout.prefetch import Prefetch
from rollmatch.rollout.prefetch_rules import PrefetchRules
from rollmatch.rollout.retry import ServerRestarted
from rollmatch.run.connect import check_versions_known

SAMPLES = [sample_of(number) for number in range(6)]
WAIT_S = 20.0


class Paused(Ladder):
    """The last sample's environment waits for ``may_reply`` in its first step, and says that it waits."""

    waits, may_reply = threading.Event(), threading.Event()

    def reset(self, sample, rng):
        self.is_slow = sample.sample_id == SAMPLES[-1].sample_id
        return super().reset(sample, rng)

    def clone(self, rng):
        twin = Paused(self.slip)
        twin.rung, twin.rng, twin.is_slow = self.rung, rng, self.is_slow
        return twin

    def step(self, action):
        if self.is_slow and self.rung == 0:
            self.waits.set()
            assert self.may_reply.wait(WAIT_S)
        return super().step(action)


class OneServer(TurnSide):
    """Writes with the version that it has; ``asked`` are (version, request id) in their order."""

    num_servers, lost = 1, ()

    def generate_on(self, server_index, requests, decoding, *, start):
        self.asked = [*getattr(self, "asked", ()), *((self.version, one.request_id) for one in requests)]
        return [self.write(request, decoding) for request in requests]


def moved(in_flight):
    """Episodes of one window, and a sync while the last one's environment is at work; and how long the sync took."""
    Paused.waits.clear()
    Paused.may_reply.clear()
    side = OneServer(letters=(A,))
    in_world = replace(world(lambda: Paused(slip=0.0)), may_move=in_flight == "keep")
    servers = EpisodeServers(side, in_world, in_flight=in_flight)
    prefetch = Prefetch(servers, side.decoding, PrefetchRules(max_windows=1, callers_per_server=1))
    with prefetch.quiet():
        pass
    prefetch.submit(0, requests_of(SAMPLES, num=1))
    assert Paused.waits.wait(WAIT_S)
    if in_flight == "wait":
        threading.Timer(0.3, Paused.may_reply.set).start()
        with prefetch.quiet():
            assert Paused.may_reply.is_set()
            side.version += 1
    else:
        with prefetch.held(), servers.held():
            assert not Paused.may_reply.is_set(), "the sync waits for no environment"
            side.version += 1
        Paused.may_reply.set()
    rollouts, _ = prefetch.collect(0, min_version=0)
    prefetch.close()
    return rollouts, side


@pytest.mark.scenario(
    "prefetch/a-sync-while-an-environment-is-at-work",
    clauses=["prefetch/a-sync-comes-in-the-midst-of-episodes#1,2,3,4"],
)
def test_a_sync_waits_for_an_episode_or_comes_between_its_turns_or_restarts_it():
    runs = {mode: moved(mode)[0] for mode in ("wait", "keep", "restart")}
    versions = {mode: [one.policy_versions for one in made] for mode, made in runs.items()}
    old, new = 3, 4
    assert versions["wait"] == [((old, 3),)] * 6
    assert versions["keep"] == [((old, 3),)] * 5 + [((old, 1), (new, 2))]
    assert versions["restart"] == [((old, 3),)] * 5 + [((new, 3),)]
    assert runs["keep"][-1].policy_version == old, "as old as its oldest token"
    texts = {mode: [one.response_token_ids for one in made] for mode, made in runs.items()}
    assert texts["wait"] == texts["keep"] == texts["restart"]


class Writing(OneServer):
    """The last sample's second turn takes until ``may_end``; new weights write its second token."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.writes, self.may_end = threading.Event(), threading.Event()

    def write(self, request, decoding):
        made = super().write(request, decoding)
        if request.request_id != "5.1":
            return made
        self.writes.set()
        assert self.may_end.wait(WAIT_S)
        return replace(made, version_runs=((made.policy_version, 1), (self.version, 1)))


@pytest.mark.scenario(
    "prefetch/a-sync-while-a-turn-is-written", clauses=["prefetch/a-sync-comes-in-the-midst-of-episodes#2,4"]
)
def test_a_sync_comes_within_a_turn():
    side = Writing(letters=(A,), decoding=Decoding(max_new_tokens=2, temperature=1.0))
    servers = EpisodeServers(side, replace(world(lambda: Ladder(slip=0.0)), may_move=True), in_flight="keep")
    prefetch = Prefetch(servers, side.decoding, PrefetchRules(max_windows=1, callers_per_server=1))
    with prefetch.quiet():
        pass
    prefetch.submit(0, requests_of(SAMPLES, num=1))
    assert side.writes.wait(WAIT_S)
    with prefetch.held(), servers.held():
        assert not side.may_end.is_set(), "the sync waits for no turn"
        side.version += 1
    side.may_end.set()
    rollouts, _ = prefetch.collect(0, min_version=0)
    prefetch.close()
    assert [one.policy_versions for one in rollouts] == [((3, 6),)] * 5 + [((3, 3), (4, 3))]
    assert rollouts[-1].policy_version == 3, "as old as its oldest token"


def test_what_has_ended_is_not_played_again():
    _, side = moved("restart")
    again = [request_id for version, request_id in side.asked if version == 4]
    assert [one.split(".")[0] for one in again] == ["5"] * 3
    assert len(side.asked) == 5 * 3 + 1 + 3


class Leaving(OneServer):
    """The second of two servers leaves: it takes no calls from then on."""

    num_servers = 2

    def generate_on(self, server_index, requests, decoding, *, start):
        if server_index in self.lost:
            raise ServerLost("has left", key="server 1", remedy="")
        return super().generate_on(server_index, requests, decoding, start=start)


@pytest.mark.scenario(clauses=["server-connection/servers-join-and-leave-a-running-job#11"])
def test_an_episode_whose_server_leaves_between_two_turns_is_played_by_another_one():
    Paused.waits.clear()
    Paused.may_reply.clear()
    side, in_world = Leaving(letters=(A,)), replace(world(lambda: Paused(slip=0.0)), may_move=True)
    servers = EpisodeServers(side, in_world, in_flight="keep")
    prefetch = Prefetch(servers, side.decoding, PrefetchRules(max_windows=1, callers_per_server=1))
    with prefetch.quiet():
        pass
    prefetch.submit(0, requests_of(SAMPLES, num=1))
    assert Paused.waits.wait(WAIT_S)
    until(lambda: None not in prefetch.windows[0].rollouts[:3])
    with prefetch.held(), servers.held():
        side.version, side.lost = side.version + 1, {1}
    Paused.may_reply.set()
    rollouts, _ = prefetch.collect(0, min_version=0)
    prefetch.close()
    assert [one.policy_versions for one in rollouts] == [((3, 3),)] * 3 + [((4, 3),)] * 3


@pytest.mark.scenario(clauses=["prefetch/a-sync-comes-in-the-midst-of-episodes#7"])
@pytest.mark.parametrize("in_flight", ["wait", "keep", "restart"])
def test_after_a_restart_no_turn_begins_before_a_sync(in_flight):
    """Two calls with three episodes each; the server is restarted in the first call's fourth turn."""

    class Restarted(OneServer):
        def generate_on(self, server_index, requests, decoding, *, start):
            super().generate_on(server_index, requests, decoding, start=start)
            if len(self.asked) == 4:
                raise ServerRestarted("was restarted")
            return [self.write(request, decoding) for request in requests]

    side = Restarted(letters=(A,))
    servers = EpisodeServers(side, world(lambda: Ladder(slip=0.0)), in_flight=in_flight)
    for place in (0, 3, 0):
        with pytest.raises(ServerRestarted):
            servers.generate_on(0, requests_of(SAMPLES[place : place + 3], num=1), side.decoding, start=place)
    assert len(side.asked) < 4 + 3, "only turns that were under way already"
    with servers.held():
        side.version += 1
    made = servers.generate_on(0, requests_of(SAMPLES[:3], num=1), side.decoding, start=0)
    assert [one.policy_versions for one in made] == [((4, 3),)] * 3


class Jittery(Ladder):
    """Replies after a random while."""

    def clone(self, rng):
        twin = Jittery(self.slip)
        twin.rung, twin.rng = self.rung, rng
        return twin

    def step(self, action):
        time.sleep(random.random() / 200)
        return super().step(action)


def test_a_thousand_episodes_end_and_are_those_that_are_played_alone():
    samples = [sample_of(number % 9) for number in range(500)]
    side = TurnSide()
    episodes = begin_all(world(Jittery), requests_of(samples, num=2), side.decoding)
    play_apart(episodes, lambda place, request: side.write(request, side.decoding))
    alone = begin_all(world(), requests_of(samples, num=2), side.decoding)
    for episode in alone:
        while episode.wants_turn:
            episode.take(side.write(episode.request(), side.decoding))
    assert [one.rollout() for one in episodes] == [one.rollout() for one in alone]


@pytest.mark.scenario(clauses=["prefetch/a-sync-comes-in-the-midst-of-episodes#6"])
@pytest.mark.parametrize("dialect", ["vllm", "swift", "trl"])
def test_servers_that_name_no_versions_let_a_sync_wait(dialect):
    with refused("in-flight-without-versions", "custom.extra.rollout_matching.vllm.sync.in_flight", problem=dialect):
        check_versions_known(ServerMembers([server_of("native"), server_of(dialect)]), "restart")


@pytest.mark.scenario(clauses=["prefetch/a-sync-comes-within-responses#4"])
@pytest.mark.parametrize("keep", [True, False])
def test_servers_that_keep_no_responses_let_a_sync_wait(keep):
    double = NativeDouble(tensors_of(0))
    double.keeps = keep
    with serving(double) as (url,):
        members = ServerMembers([connected(url)])
        check_versions_known(members, "restart")
        if keep:
            check_versions_known(members, "keep")
            return
        with refused("in-flight-without-versions", "custom.extra.rollout_matching.vllm.sync.in_flight", problem=url):
            check_versions_known(members, "keep")


GRPO = ("custom.trainer_variant=grpo", "custom.extra.grpo.num_generations=3", "training.max_steps=5")
ONE_STEP = ("custom.extra.grpo.steps_per_generation=1", "custom.extra.grpo.num_iterations=1")


@pytest.mark.scenario("prefetch/five-steps-with-episodes", clauses=["prefetch/grpo-plays-episodes-ahead#1,2,3"])
@pytest.mark.parametrize("in_flight", ["wait", "keep", "restart"])
def test_a_run_learns_from_episodes_that_are_as_old_as_allowed(in_flight, tmp_path):
    requested = {}
    for mode in ("off", "ahead"):
        trainer = make_trainer(tmp_path / mode, *GRPO, *ONE_STEP)
        attach_servers(trainer, mode, max_staleness=1, in_flight=in_flight)
        note_what_is_learnt(trainer)
        trainer.train()
        trained = [event for event in events(trainer, "requested") if event["purpose"] == "train"]
        requested[mode] = [(one["step"], one["sample_ids"], one["seeds"]) for one in trained][:5]
    trainer.overlap.prefetch.close()
    assert requested["off"] == requested["ahead"]
    assert max(trainer.ages) == 1
    runs = [run for event in events(trainer, "played") for one in event["policy_versions"] for run in one]
    assert {version for version, _ in runs} <= set(trainer.source.fence.step_of)
    assert len(events(trainer, "played")) == 5
