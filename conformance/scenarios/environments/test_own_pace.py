"""Episodes that go at their own pace: none waits for the environment of another one."""

import threading
from dataclasses import dataclass, field

import pytest

from conformance.doubles.ladders import Ladder, TurnSide, world
from conformance.doubles.locks import A, requests_of, sample_of
from conformance.doubles.ranks import alone
from rollmatch.records import RolloutRequest
from rollmatch.rollout.episodes import begin_all, play_apart, play_in_waves
from rollmatch.rollout.retry import ServerRestarted

SAMPLES = [sample_of(number) for number in range(8)]
WAIT_S = 20.0


@dataclass
class Writing(TurnSide):
    """Turns of many episodes at a time; ``written`` are the requests in their order."""

    restarts: int = 0
    written: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write_turn(self, place: int, request: RolloutRequest):
        with self.lock:
            self.written.append(request)
            if self.restarts and len(self.written) % 5 == 0:
                self.restarts -= 1
                raise ServerRestarted("was restarted")
            return self.write(request, self.decoding)


def played(side, in_world=None, *, num=2):
    episodes = begin_all(in_world or world(), requests_of(SAMPLES, num=num), side.decoding)
    play_apart(episodes, side.write_turn)
    return [episode.rollout() for episode in episodes]


@pytest.mark.scenario(clauses=["environments/episodes-go-at-their-own-pace#2"])
def test_what_is_played_is_that_of_waves():
    side, waves = Writing(), TurnSide()
    episodes = begin_all(world(), requests_of(SAMPLES, num=4), waves.decoding)
    play_in_waves(episodes, waves.decoding, generate=waves.generate, ranks=alone())
    assert played(side, num=4) == [episode.rollout() for episode in episodes]
    assert len({one.request_id for one in side.written}) == len(side.written), "each turn was requested once"


class Held(Ladder):
    """The first sample's environment waits until all others have ended."""

    others = threading.Semaphore(0)

    def reset(self, sample, rng):
        self.is_slow = sample.sample_id == 0
        return super().reset(sample, rng)

    def clone(self, rng):
        twin = Held(self.slip)
        twin.rung, twin.rng, twin.is_slow = self.rung, rng, self.is_slow
        return twin

    def step(self, action):
        if self.is_slow and self.rung == 0:
            for _ in SAMPLES[1:]:
                assert self.others.acquire(timeout=WAIT_S), "the others wait for this environment"
        answer = super().step(action)
        if answer[2] and not self.is_slow:
            self.others.release()
        return answer


@pytest.mark.scenario(
    "environments/one-environment-waits-for-all-others", clauses=["environments/episodes-go-at-their-own-pace#1"]
)
def test_no_episode_waits_for_the_environment_of_another_one():
    side = Writing(letters=(A,))
    made = played(side, world(lambda: Held(slip=0.0)), num=1)
    assert [one.trajectory.is_finished for one in made] == [True] * len(SAMPLES)
    assert {request.sample.sample_id for request in side.written[-2:]} == {0}


@pytest.mark.scenario(clauses=["environments/episodes-go-at-their-own-pace#3"])
def test_after_a_restart_episodes_go_on_from_their_last_turn():
    side, expected = Writing(restarts=3), played(Writing())
    episodes = begin_all(world(), requests_of(SAMPLES, num=2), side.decoding)
    num_attempts = 0
    while any(episode.wants_turn for episode in episodes):
        num_attempts += 1
        try:
            play_apart(episodes, side.write_turn)
        except ServerRestarted:
            assert num_attempts <= 3
    assert num_attempts == 4
    assert [episode.rollout() for episode in episodes] == expected
    num_turns = sum(len(one.trajectory.turns) for one in expected)
    assert len(side.written) == num_turns + 3, "only what the restarts cost was written again"
